"""The commands `indilog invocation show` and `cancel`, for asynchronous calls."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from indilog.cli import show as printed
from indilog.cli.gateway import DEFAULT, Gateway, Url, explain_mistakes, stop
from indilog.cli.quantities import wait_s_of

invocations = typer.Typer(help="Show or cancel asynchronous calls.", no_args_is_help=True)

_OPEN: Final = ("scheduled", "running")
_WAIT_S_MAX: Final = 60.0
"""Longest wait of one request, in seconds."""
_PAUSE_S: Final = 0.5
"""Seconds between two requests, because a platform with too many waiting requests answers without
waiting.
"""


@invocations.command()
def show(
    invocation: Annotated[
        str, typer.Argument(help="The id that `indilog invoke --async` printed.", metavar="ID")
    ],
    *,
    wait: Annotated[
        str | None, typer.Option(help="Longest wait for the end, such as 30s.", metavar="TIME")
    ] = None,
    url: Url = DEFAULT,
) -> None:
    """Print an asynchronous call as JSON: its state, and its result or problem if it has ended."""
    with explain_mistakes():
        wait_s = wait_s_of(wait) if wait is not None else 0.0
    printed.value(_outcome_of(Gateway(url), _path(invocation), wait_s))


@invocations.command()
def cancel(
    invocation: Annotated[
        str, typer.Argument(help="The id that `indilog invoke --async` printed.", metavar="ID")
    ],
    *,
    url: Url = DEFAULT,
) -> None:
    """Cancel an asynchronous call: a waiting one never begins, a running one is asked to stop."""
    printed.value(Gateway(url).delete(_path(invocation), headers={}))


def _path(invocation: str) -> str:
    if not invocation:
        stop("Give the id that `indilog invoke --async` printed.")
    name = quote(invocation, safe="").replace(".", "%2E")  # otherwise "." is a path segment
    return f"/invocations/{name}"


def _outcome_of(gateway: Gateway, path: str, wait_s: float) -> Any:  # noqa: ANN401 - any JSON value
    """Return the answer when it has an outcome, or when the time is up."""
    end = time.monotonic() + wait_s
    while True:
        left_s = max(0.0, end - time.monotonic())
        found = gateway.get(path, wait=min(left_s, _WAIT_S_MAX))
        if found["state"] not in _OPEN or time.monotonic() >= end:
            return found
        time.sleep(min(left_s, _PAUSE_S))
