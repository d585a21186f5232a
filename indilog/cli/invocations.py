"""The commands `indilog invocation list`, `show` and `cancel`, for asynchronous calls."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any, Final

import typer

from indilog.cli import show as printed
from indilog.cli.gateway import DEFAULT, Gateway, Url, explain_mistakes, stop
from indilog.cli.quantities import wait_s_of
from indilog.link.access import segment

invocations = typer.Typer(help="List, show or cancel asynchronous calls.", no_args_is_help=True)

_COLUMNS: Final = ("invocation", "function", "state", "due", "ended", "tries")
_OPEN: Final = ("scheduled", "running")
_WAIT_S_MAX: Final = 60.0
"""Longest wait of one request, in seconds."""
_PAUSE_S: Final = 0.5
"""Seconds between two requests, because a platform with too many waiting requests answers without
waiting.
"""


@invocations.command(name="list")
def list_(
    *,
    app: Annotated[str | None, typer.Option(help="Only calls of this application.")] = None,
    function: Annotated[
        str | None, typer.Option(help="Only calls of this function.", metavar="APP.FUNCTION")
    ] = None,
    state: Annotated[str | None, typer.Option(help="scheduled, running, done or failed.")] = None,
    limit: Annotated[int, typer.Option(help="Largest number of calls.", min=1, max=1_000)] = 20,
    page: Annotated[
        int | None, typer.Option(help="Continue a list; it ended with this value.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value per call.")] = False,
    url: Url = DEFAULT,
) -> None:
    """List asynchronous calls, and those with an idempotency key, newest first."""
    query = {"app": app, "function": function, "state": state, "limit": limit, "page": page}
    answer = Gateway(url).get("/invocations", **query)
    found = answer["invocations"]
    if as_json:
        for call in found:
            printed.line(json.dumps(call, ensure_ascii=False))
    elif found:
        title = "Recorded calls, newest first (times are UTC)"
        printed.table(title, _COLUMNS, [_row(call) for call in found])
    else:
        printed.line("There are no such calls.")
    if answer["next"] is not None:
        sys.stderr.write(f"There are more calls: --page {answer['next']}\n")


def _row(call: dict[str, Any]) -> list[object]:
    times = [printed.utc(call["due"]), printed.utc(call["ended"])]
    return [call["id"], call["function"], call["state"], *times, call["tries"]]


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
    return f"/invocations/{segment(invocation)}"


def _outcome_of(gateway: Gateway, path: str, wait_s: float) -> Any:  # noqa: ANN401 - any JSON value
    """Return the answer when it has an outcome, or when the time is up."""
    end = time.monotonic() + wait_s
    while True:
        left_s = max(0.0, end - time.monotonic())
        found = gateway.get(path, wait=min(left_s, _WAIT_S_MAX))
        if found["state"] not in _OPEN or time.monotonic() >= end:
            return found
        time.sleep(min(left_s, _PAUSE_S))
