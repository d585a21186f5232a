"""The commands `indilog runs`: start, see and steer workflow runs.

They send requests below `/runs` to a `Gateway`. The answers have the forms of `indilog.sdk.runs`.
"""

from __future__ import annotations

import json as json_texts
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import typer

from indilog.cli import show as printed
from indilog.cli.arguments import ARGUMENTS_HELP, arguments_in
from indilog.cli.gateway import DEFAULT, FAILURE, Gateway, Url, explain_mistakes, stop
from indilog.cli.quantities import duration_s_in, duration_text, wait_s_of
from indilog.link.access import segment
from indilog.sdk.runs import RUNS_MAX, STEPS_SHOWN, STEPS_SHOWN_MAX

runs = typer.Typer(help="Start, see and steer workflow runs.", no_args_is_help=True)

_SSE_DATA: Final = "data: "
_ENDED: Final = ("done", "failed", "cancelled")
_WAIT_S_MAX: Final = 300.0
"""Longest wait of one request, in seconds."""
_EMPTY_PAGES_MAX: Final = 10_000
_VALUE_CHARACTERS_MAX: Final = 100

App = Annotated[
    str | None,
    typer.Option(help="Application of the run; needed if several have such a run."),
]
RunId = Annotated[str, typer.Argument(help="The run's id.", metavar="ID")]


@runs.command(name="list")
def list_(
    *,
    app: Annotated[str | None, typer.Option(help="Only runs of this application.")] = None,
    workflow: Annotated[str | None, typer.Option(help="Only runs of this workflow.")] = None,
    state: Annotated[
        str | None, typer.Option(help="running, parked, done, failed or cancelled.")
    ] = None,
    id_prefix: Annotated[
        str | None, typer.Option("--id", help="Only runs whose id begins so.", metavar="PREFIX")
    ] = None,
    older: Annotated[
        str | None,
        typer.Option(help="Only runs that began (ended) before (10m, 2d).", metavar="AGE"),
    ] = None,
    newer: Annotated[
        str | None,
        typer.Option(help="Only runs that began (ended) since (10m, 2d).", metavar="AGE"),
    ] = None,
    version: Annotated[
        int | None, typer.Option(help="Only runs with the code of this deployment.", min=1)
    ] = None,
    limit: Annotated[int, typer.Option(help="Largest number of runs.", min=1)] = 20,
    page: Annotated[
        str | None, typer.Option(help="Continue a list; it ended with this value.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value per run.")] = False,
    url: Url = DEFAULT,
) -> None:
    """List workflow runs, newest first: by their starts; with an ended state, by their ends."""
    with explain_mistakes():
        ages = {"older_s": _age_s("--older", older), "newer_s": _age_s("--newer", newer)}
    named = {"workflow": workflow, "state": state, "id_prefix": id_prefix, "version": version}
    filters = {"app": app, **named, **ages}
    listing = _Listing(Gateway(url), filters, page)
    found = list(listing.first(limit))
    if as_json:
        for run in found:
            printed.line(json_texts.dumps(run, ensure_ascii=False))
    elif found:
        printed.table("Runs, newest first (times are UTC)", _COLUMNS, [_row(run) for run in found])
    elif not listing.missing:
        printed.line("There are no such runs.")
    for sentence in listing.missing.values():
        sys.stderr.write(f"warning: {sentence}\n")
    if listing.page is not None:
        sys.stderr.write(f"There are more runs: --page {listing.page}\n")


@runs.command()
def start(
    workflow: Annotated[str, typer.Argument(help="APP.WORKFLOW", metavar="WORKFLOW")],
    arguments: Annotated[list[str] | None, typer.Argument(help=ARGUMENTS_HELP)] = None,
    *,
    json_text: Annotated[
        str | None, typer.Option("--json", help="Arguments as a JSON object.", metavar="JSON")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--id", help="Id of the run; if it exists, nothing is started.", metavar="ID"),
    ] = None,
    wait: Annotated[
        str | None, typer.Option(help="Wait so long for its end (30s, 5m).", metavar="TIME")
    ] = None,
    url: Url = DEFAULT,
) -> None:
    """Start a run of a workflow, and print its id; with --wait, print its result."""
    with explain_mistakes():
        app, dot, name = workflow.partition(".")
        if not (app and dot and name):
            raise ValueError(f"A workflow is named APP.WORKFLOW, not {workflow!r}.")
        given = arguments_in(arguments or [], json_text)
        wait_s = wait_s_of(wait) if wait is not None else None
    gateway = Gateway(url)
    body = {"workflow": name, "arguments": given} | ({} if run is None else {"id": run})
    new = gateway.post(f"/runs/{segment(app)}", json=body)["id"]
    if wait_s is None:
        printed.line(new)
    else:
        _print_result(gateway, app, new, wait_s)


@runs.command()
def result(
    run: RunId,
    *,
    wait: Annotated[
        str | None, typer.Option(help="Wait so long for its end (30s, 5m).", metavar="TIME")
    ] = None,
    app: App = None,
    url: Url = DEFAULT,
) -> None:
    """Print the result of a run."""
    with explain_mistakes():
        wait_s = wait_s_of(wait) if wait is not None else 0.0
    gateway = Gateway(url)
    _print_result(gateway, app or _app_of(gateway, run), run, wait_s)


@runs.command()
def show(
    run: RunId,
    *,
    app: App = None,
    steps: Annotated[
        int, typer.Option(help="Show the last so many steps.", min=0, max=STEPS_SHOWN_MAX)
    ] = STEPS_SHOWN,
    round_: Annotated[
        int | None, typer.Option("--round", help="Show this round; default: the newest.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    url: Url = DEFAULT,
) -> None:
    """Show one run: its state, its last steps, what it waits for, and what to do about it."""
    gateway = Gateway(url)
    found = gateway.get(_path(gateway, run, app), steps=steps, round=round_)
    if as_json:
        printed.value(found)
    else:
        _print_run(found)


@runs.command()
def events(
    run: RunId,
    *,
    after: Annotated[
        int | None, typer.Option(help="Only events with a greater seqnum.", min=-1)
    ] = None,
    app: App = None,
    url: Url = DEFAULT,
) -> None:
    """Print what a run publishes and each change of its state, as JSON lines, until it ends."""
    import httpx

    gateway = Gateway(url)
    path = f"{_path(gateway, run, app)}/events"
    seen, is_whole = after, False
    try:
        with gateway.lines(path, after=after) as lines:
            for line in lines:
                if line.startswith(_SSE_DATA):
                    event = json_texts.loads(line.removeprefix(_SSE_DATA))
                    printed.line(json_texts.dumps(event, ensure_ascii=False))
                    seen = event["seqnum"]
                    is_whole = event["kind"] == "state" and event["data"]["state"] in _ENDED
    except httpx.HTTPError as error:
        if seen is None:
            gateway.unreachable(error)
    if not is_whole and not _has_ended(gateway, path):
        last = -1 if seen is None else seen
        stop(f"The connection broke; continue with --after {last}.", FAILURE)


@runs.command()
def cancel(run: RunId, *, app: App = None, url: Url = DEFAULT) -> None:
    """Cancel a run: its next operation raises `Cancelled` in it, so it can undo what it did."""
    _act(url, run, app, "cancel", {})
    printed.line(f"The cancellation of run {run} is requested.")


@runs.command()
def retry(run: RunId, *, app: App = None, url: Url = DEFAULT) -> None:
    """Execute a parked run again now, with the deployed code."""
    _act(url, run, app, "retry", {})
    printed.line(f"Run {run} is executed again; `indilog runs show {run}` shows it.")


@runs.command()
def fork(
    run: RunId,
    step: Annotated[str, typer.Argument(help="Number or name of the step to do again.")],
    *,
    app: App = None,
    url: Url = DEFAULT,
) -> None:
    """Start a new run that continues from a step of this run, with the deployed code."""
    new = _act(url, run, app, "fork", {"step": step})
    printed.line(new["id"])


@runs.command()
def move(
    run: Annotated[
        str | None, typer.Argument(help="The run's id; without one, all open runs of --app.")
    ] = None,
    *,
    version: Annotated[
        int | None, typer.Option(help="Number of the deployment; default: the newest.", min=1)
    ] = None,
    app: App = None,
    workflow: Annotated[str | None, typer.Option(help="Only runs of this workflow.")] = None,
    state: Annotated[str | None, typer.Option(help="Only running or parked ones.")] = None,
    from_version: Annotated[
        int | None, typer.Option("--from", help="Only runs with this deployment's code.", min=1)
    ] = None,
    url: Url = DEFAULT,
) -> None:
    """Continue runs with the code of another deployment, if that continues their history."""
    filters = {"workflow": workflow, "state": state, "from_version": from_version}
    given: dict[str, Any] = {} if version is None else {"version": version}
    if run is not None:
        if any(filters.values()):
            stop("Give the id of one run, or filters, not both.")
        to = _act(url, run, app, "move", given)["version"]
        printed.line(
            f"Run {run} continues with deployment {to}; `indilog runs show {run}` shows it."
        )
        return
    if app is None:
        stop("Give the id of a run, or the application of the runs with --app.")
    given |= {name: value for name, value in filters.items() if value is not None}
    _move_all(Gateway(url), app, given, [state] if state is not None else ["running", "parked"])


def _move_all(gateway: Gateway, app: str, given: dict[str, Any], states: list[str]) -> None:
    moved, refused = 0, 0
    for state in states:
        page: dict[str, Any] = {}
        while True:
            body = {**given, "state": state, **page}
            found = gateway.post(f"/runs/{segment(app)}/move", json=body)
            moved, refused = moved + len(found["moved"]), refused + len(found["refused"])
            for one in found["refused"]:
                printed.line(_plain(one["reason"]))
            if found["version"] is not None:  # the next pages use it, even after a deployment
                given = {**given, "version": found["version"]}
            if found["next"] is None:
                break
            page = {"page": found["next"]}
    to = f"deployment {given['version']}" if "version" in given else "other code"
    printed.line(f"{moved:,} runs continue with {to}; {refused:,} keep their code.")
    if refused:
        raise typer.Exit(FAILURE)


@runs.command()
def signal(
    run: RunId,
    name: Annotated[str, typer.Argument(help="Name of the signal.")],
    value: Annotated[str | None, typer.Argument(help="Its value as JSON; default: true.")] = None,
    *,
    key: Annotated[
        str | None, typer.Option(help="Of several signals with one key, the first counts.")
    ] = None,
    app: App = None,
    url: Url = DEFAULT,
) -> None:
    """Send a run a signal. It stays in the log until the run reads it."""
    given: dict[str, Any] = {"name": name}
    if value is not None:
        try:
            given["value"] = json_texts.loads(value)
        except ValueError as error:
            stop(f"The value is not JSON: {error}; text is written '\"text\"'.")
    if key is not None:
        given["key"] = key
    _act(url, run, app, "signal", given)
    printed.line(f"Sent to run {run}.")


@runs.command()
def query(
    run: RunId,
    name: Annotated[str, typer.Argument(help="A query, or name or number of a step.")] = "",
    arguments: Annotated[
        list[str] | None, typer.Argument(help=f"Of the query: {ARGUMENTS_HELP}")
    ] = None,
    *,
    app: App = None,
    url: Url = DEFAULT,
) -> None:
    """Print the answer of a query of the run, or the result of its last step with a name; without
    a name, the status that it set.
    """
    with explain_mistakes():
        given = arguments_in(arguments or [])
    more = {"arguments": given} if given else {}
    printed.value(_act(url, run, app, "query", {"name": name, **more}))


# --- requests


class _Listing:
    """Reads the list of runs, page by page.

    Attributes:
        page: where the list continues; None: it has ended.
        missing: the applications whose runs are missing, and why.
    """

    def __init__(
        self, gateway: Gateway, filters: Mapping[str, object], page: str | None = None
    ) -> None:
        self.page = page
        self.missing: dict[str, str] = {}
        self._gateway = gateway
        self._filters = filters

    def first(self, limit: int) -> Iterator[dict[str, Any]]:
        """Yield the first `limit` runs; `page` then says where the list continues."""
        for _ in range(_EMPTY_PAGES_MAX):
            size = min(limit, RUNS_MAX)
            answer = self._gateway.get("/runs", **self._filters, limit=size, page=self.page)
            self.missing |= answer["not_answered"]
            self.page = answer["next"]
            yield from answer["runs"]
            limit -= len(answer["runs"])
            if self.page is None or limit <= 0:
                return


def _act(url: str, run: str, app: str | None, action: str, body: dict[str, Any]) -> Any:  # noqa: ANN401 - any JSON value
    gateway = Gateway(url)
    return gateway.post(f"{_path(gateway, run, app)}/{action}", json=body)


def _path(gateway: Gateway, run: str, app: str | None) -> str:
    """Return the path of a run; without an application, find the one that has it."""
    if not run:
        stop("Give the id of a run; `indilog runs list` shows them.")
    if app is None:
        app = _app_of(gateway, run)
    return f"/runs/{segment(app)}/{segment(run)}"


def _app_of(gateway: Gateway, run: str) -> str:
    listing = _Listing(gateway, {"id": run})
    apps = sorted({str(found["app"]) for found in listing.first(RUNS_MAX)})
    if len(apps) > 1:
        stop(f"The apps {', '.join(apps)} have a run {run!r}; name one with --app.")
    if not apps and listing.missing:
        why = " ".join(listing.missing.values())
        stop(f"{why} So it is unknown which app has run {run!r}; name it with --app.", FAILURE)
    if not apps:
        stop(f"No deployed app has a run {run!r}; `indilog runs list` shows the runs.")
    return apps[0]


def _has_ended(gateway: Gateway, path: str) -> bool:
    state: str = gateway.get(path.removesuffix("/events"), steps=0)["run"]["state"]
    return state in _ENDED


def _age_s(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    if (seconds := duration_s_in(text)) is None:
        raise ValueError(f"{option} is an age (90s, 10m, 2d), not {text!r}.")
    return seconds


# --- output


def _print_result(gateway: Gateway, app: str, run: str, wait_s: float) -> None:
    """Wait for the end of a run, and print its result; stop if it failed or has not ended."""
    path = f"/runs/{segment(app)}/{segment(run)}/result"
    ends = time.monotonic() + wait_s
    while True:
        left = max(ends - time.monotonic(), 0)
        found = gateway.get(path, wait=min(left, _WAIT_S_MAX))
        if found["state"] in _ENDED or time.monotonic() >= ends:
            break
    if found["state"] == "done":
        printed.value(found["result"])
        return
    problem = f": {_plain(found['problem'])}" if found["problem"] else "."
    stop(f"Run {_plain(run)} is {found['state']}{problem}", FAILURE)


_COLUMNS: Final = ("app", "run", "workflow", "state", "began", "steps", "problem")
_WAIT_COLUMNS: Final = ("operation", "since", "until", "failed", "next attempt", "error")
_STEP_COLUMNS: Final = ("number", "step", "kind", "decided", "attempts", "took", "result")


def _row(run: Mapping[str, Any]) -> list[object]:
    return [
        run["app"],
        _plain(run["id"]),
        run["workflow"],
        run["state"],
        printed.utc(run["began"]),
        "" if run["steps"] is None else run["steps"],
        _plain(run["problem"] or (f"waits for {run['waits']}" if run["waits"] else "")),
    ]


def _print_run(found: Mapping[str, Any]) -> None:
    run = found["run"]
    printed.line(f"Run {_plain(run['id'])} of {run['app']}: {run['state']}.")
    about = {
        "workflow": run["workflow"],
        "began": printed.utc(run["began"]),
        "last change": printed.utc(found["changed"]),
        "owner": f"{found['owner']}, epoch {found['epoch']}",
        "started by": found["parent"],
        "continues": found["forked"],
        "version": _version(found),
        "round": _round(found),
        "arguments": _value(found["arguments"]),
        "cancellation": "requested" if found["cancel_asked"] else None,
        "result": _value(found["result"]) if run["state"] == "done" else None,
        "status": None if run["value"] is None else _value(run["value"]),
        "problem": run["problem"],
        "what to do": found["advice"],
    }
    printed.pairs({name: _plain(text) for name, text in about.items() if text is not None})
    if found["waits"]:
        printed.table("\nWaits for", _WAIT_COLUMNS, list(map(_wait, found["waits"])))
    if unconsumed := found.get("unconsumed"):
        others = f" (and {n:,} of other names)" if (n := found["unconsumed_others"]) else ""
        rows: list[list[object]] = [[_plain(one["name"]), one["count"]] for one in unconsumed]
        title = f"\nSignals that no operation has consumed{others}"
        printed.table(title, ("signal", "count"), rows)
    if found["steps"]:
        earlier = f" ({found['steps_before']:,} earlier ones)" if found["steps_before"] else ""
        title = f"\nDecided steps{earlier}"
        printed.table(title, _STEP_COLUMNS, list(map(_step, found["steps"])))


def _round(found: Mapping[str, Any]) -> str | None:
    """Return which round of a run is shown; None: the run has one round, or reports none."""
    predecessor, successor = found.get("predecessor"), found.get("successor")
    texts = [str(found.get("round", 1))]
    if predecessor is not None:
        texts.append(f"after round {predecessor}")
    if successor is not None:
        texts.append(f"before round {successor}")
    return ", ".join(texts) if len(texts) > 1 else None


def _version(found: Mapping[str, Any]) -> str | None:
    """Return the deployment whose code a run uses, as text; None: it is not known."""
    version, moved = found["run"].get("version"), found.get("moved")
    if version is None:
        return None
    text = str(version) if moved is None else f"{version}, moved to it at {printed.utc(moved)}"
    to = found.get("moves_to")
    return text if to is None else f"{text}, moves to {to}"


def _wait(wait: Mapping[str, Any]) -> list[object]:
    return [
        _plain(wait["what"]),
        printed.utc(wait["since"]),
        printed.utc(wait["until"]),
        wait["attempts"],
        printed.utc(wait.get("next_attempt")),
        _plain(wait["error"] or ""),
    ]


def _step(step: Mapping[str, Any]) -> list[object]:
    return [
        step["number"],
        _plain(step["name"]),
        step["kind"],
        printed.utc(step["decided"]),
        "" if step["attempts"] is None else step["attempts"],
        "" if step["duration_s"] is None else duration_text(round(step["duration_s"], 3)),
        _plain(step["error"] or _value(step["result"])),
    ]


def _value(value: object) -> str:
    text = value if isinstance(value, str) else json_texts.dumps(value, ensure_ascii=False)
    if len(text) <= _VALUE_CHARACTERS_MAX:
        return text
    return f"{text[:_VALUE_CHARACTERS_MAX]}… ({len(text):,} characters)"


def _plain(text: str) -> str:
    """Return a text without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
