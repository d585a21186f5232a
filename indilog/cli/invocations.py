"""The commands `indilog invocation list`, `show`, `cancel`, `held` and `release`.

They send requests below `/invocations` to a `Gateway`.
"""

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

invocations = typer.Typer(
    help="List, show or cancel asynchronous calls; release held outcomes.", no_args_is_help=True
)

_COLUMNS: Final = ("invocation", "function", "state", "due", "ended", "tries")
_HELD_COLUMNS: Final = ("log", "run", "calls", "bytes")
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


@invocations.command()
def held(
    *,
    log: Annotated[
        str | None, typer.Option(help="Only runs of the flow with this log, such as shop/flow.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value per run.")] = False,
    url: Url = DEFAULT,
) -> None:
    """List the workflow runs that have not recorded the outcomes of their calls."""
    answer = Gateway(url).get("/invocations/held", log=log)
    found = answer["held"]
    if as_json:
        for one in found:
            printed.line(json.dumps(one, ensure_ascii=False))
    elif found:
        rows = [[one["log"], one["run"], one["calls"], one["bytes"]] for one in found]
        printed.table("Outcomes of calls that are held for runs", _HELD_COLUMNS, rows)
    else:
        printed.line("No outcomes are held.")
    if answer["has_more"]:
        sys.stderr.write("There may be more runs; name one flow with --log.\n")


@invocations.command()
def release(
    log: Annotated[
        str, typer.Argument(help="The log of the flow, such as shop/flow.", metavar="LOG")
    ],
    *,
    run: Annotated[str, typer.Option(help="Only what is held for this run.", metavar="ID")] = "",
    url: Url = DEFAULT,
) -> None:
    """Release outcomes that are held for runs of an application that is not deployed again.

    They are then kept for a day (results_kept_s). A run that continues later makes the call again.
    """
    found = Gateway(url).delete("/invocations/held", headers={}, log=log, run=run)
    printed.line(f"Released the outcomes of {found['released']:,} calls.")


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
