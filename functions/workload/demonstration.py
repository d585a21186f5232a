"""Runs an application's demo on a running platform: loads data, runs clients, checks the result,
prints a table.

Demos and benchmarks share `demonstrate`; each application implements `Application`. `load` runs the
clients, and `replay` replays the log for the check.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import httpx
import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from functions.workload.load import LoadError, LoadRun, Visitor, run_load
from functions.workload.replay import TraceReplay, faults_of_objects, replayed, summary_of
from indilog import reach

_TICK_S: Final = 0.2
_REASONS_SHOWN_MAX: Final = 3
_INDEX_PARTS: Final = ("suffix", "popularity_cache", "tag_cache", "answer_cache")
_LAST_ASKED: Final = ("popularity_cache", "answer_cache")
"""The parts of the local index that are searched last; their misses go to the index tier."""


class Application(Protocol):
    """The interface of an application for demos and benchmarks.

    Attributes:
        name: name of the deployed app, and of the log with its objects.
        functions: names of the functions that clients call.
        loads: description of the loaded data, for the progress bar.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def functions(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def loads(self) -> str: ...  # noqa: D102

    def batches(self) -> int:
        """Return the number of loading steps."""

    async def load(self, url: str, report: Callable[[int], None]) -> str:
        """Load the data that the clients need, unless it is already there; return a description of
        the data.
        """

    def visitors(self, count: int, seed: int) -> list[Visitor]:
        """Return `count` clients, whose requests `faults` checks.

        The writes of each client differ from those of all other clients, also in other runs.
        """

    async def settle(self, url: str) -> None:
        """Wait until the background work of all requests has ended."""

    def faults(self, replay: TraceReplay) -> list[str]:
        """Return the guarantees that the replayed log shows as broken, one sentence each."""

    def verdict(self, replay: TraceReplay) -> str:
        """Return a sentence with the guarantees that hold; called if there is no fault."""


@dataclass(frozen=True)
class Figures:
    """Counters of the platform, read before and after the load."""

    tail: int
    hits: int
    misses: int


@dataclass(frozen=True)
class DemonstrationResult:
    """The result of one run of the load."""

    clients: int
    run: LoadRun
    before: Figures
    after: Figures
    replay: TraceReplay
    faults: list[str]

    @property
    def appends(self) -> int:
        """Number of the application's records appended during the load."""
        return self.after.tail - self.before.tail

    @property
    def conflicts(self) -> int:
        """Number of transactions among these records that had no effect and were retried."""
        return sum(seqnum >= self.before.tail for seqnum in self.replay.conflicts)


async def demonstrate(
    url: str,
    application: Application,
    *,
    seconds: float,
    clients: int,
    seed: int,
    rate: float | None = None,
    requests_min: int = 0,
    console: Console,
) -> DemonstrationResult:
    """Load the data, run the clients and check the result, with progress bars. `run_load` explains
    the arguments.

    Raises:
        LoadError: the platform refuses or fails a necessary request.
    """
    columns = (TextColumn("{task.description:<24}"), BarColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        await _load(progress, url, application)
        before = await figures(url, application.name)
        visitors = application.visitors(clients, seed)
        run = await _ran(progress, url, application, visitors, seconds, rate, requests_min)
        await application.settle(url)
        after = await figures(url, application.name)
        replay, faults = await _replay_and_check(progress, url, application)
    return DemonstrationResult(clients, run, before, after, replay, faults)


async def _load(progress: Progress, url: str, application: Application) -> None:
    task = progress.add_task(f"Loading {application.loads}", total=application.batches(), note="")

    def tell(batches: int) -> None:
        progress.advance(task, batches)

    progress.update(task, note=await application.load(url, tell))


async def _ran(
    progress: Progress,
    url: str,
    application: Application,
    visitors: Sequence[Visitor],
    seconds: float,
    rate: float | None,
    requests_min: int,
) -> LoadRun:
    task = progress.add_task(f"{len(visitors)} clients at work", total=seconds, note="")
    ticking = asyncio.create_task(_tick(progress, task))
    try:
        run = await run_load(
            url,
            application.name,
            visitors,
            functions=application.functions,
            seconds=seconds,
            rate=rate,
            requests_min=requests_min,
        )
    finally:
        ticking.cancel()
    progress.update(task, completed=seconds, note=f"{run.requests:,} requests")
    return run


async def _tick(progress: Progress, task: TaskID) -> None:
    began = time.perf_counter()
    while True:
        await asyncio.sleep(_TICK_S)
        progress.update(task, completed=time.perf_counter() - began)


async def _replay_and_check(
    progress: Progress, url: str, application: Application
) -> tuple[TraceReplay, list[str]]:
    task = progress.add_task("Checking against the log", total=None, note="")

    def tell(bound: int, tail: int) -> None:
        progress.update(task, completed=bound, total=tail, note=f"{bound:,} of {tail:,} records")

    replay, faults = await checked(url, application, tell)
    progress.update(task, total=1, completed=1, note=f"{replay.records:,} records replayed")
    return replay, faults


async def checked(
    url: str, application: Application, report: Callable[[int, int], None]
) -> tuple[TraceReplay, list[str]]:
    """Replay the application's log; return the replay and the faults.

    Args:
        url: URL of the gateway.
        application: application whose clients have run.
        report: called with the next seqnum, and the tail.
    """
    replay = await replayed(url, application.name, report)
    return replay, application.faults(replay) + await faults_of_objects(
        url, application.name, replay
    )


async def figures(url: str, log: str) -> Figures:
    """Return the platform's counters.

    Raises:
        LoadError: the platform does not answer.
    """
    try:
        async with httpx.AsyncClient(**reach(url).for_httpx, timeout=30.0) as client:
            tail = (await client.get(f"/logs/{log}/tail")).raise_for_status().json()["tail"]
            status = (await client.get("/status")).raise_for_status().json()
    except httpx.HTTPError as error:
        raise LoadError(f"The platform at {url} does not answer: {error}.") from error
    engine: dict[str, Any] = status.get("engine", {})
    return Figures(
        tail=tail,
        hits=sum(engine.get(part, {}).get("hits", 0) for part in _INDEX_PARTS),
        misses=sum(engine.get(part, {}).get("misses", 0) for part in _LAST_ASKED),
    )


def show(application: Application, outcome: DemonstrationResult, console: Console) -> None:
    """Print the table, then either the failures with their causes, or the guarantees that hold."""
    console.print(table_of(application, outcome))
    for name, tally in outcome.run.tallies.items():
        for reason, count in tally.failures.most_common(_REASONS_SHOWN_MAX):
            console.print(f"{name} failed {count} times: {reason}", style="yellow")
    if not outcome.faults:
        console.print(
            f"Checked: {len(outcome.replay.objects):,} objects equal a replay of the log; "
            f"{application.verdict(outcome.replay)}",
            style="green",
        )


def table_of(application: Application, outcome: DemonstrationResult) -> Table:
    """Return the measurements as a table."""
    run = outcome.run
    table = Table(
        title=f"functions/{application.name}: {outcome.clients} clients, {run.seconds:.1f} s"
    )
    for heading in ("function", "requests", "requests/s", "p50 ms", "p99 ms", "failed"):
        table.add_column(heading, justify="left" if heading == "function" else "right")
    for name, tally in (*run.tallies.items(), ("all", run.all)):
        if name == "all":
            table.add_section()
        table.add_row(
            name,
            f"{len(tally.latencies_s):,}",
            f"{len(tally.latencies_s) / run.seconds:,.0f}",
            f"{tally.percentile_s(50) * 1000:.2f}",
            f"{tally.percentile_s(99) * 1000:.2f}",
            f"{sum(tally.failures.values()):,}",
        )
    before, after, replay = outcome.before, outcome.after, outcome.replay
    lookups = after.hits + after.misses - before.hits - before.misses
    hits = f"{(after.hits - before.hits) / lookups:.1%}" if lookups else "no lookups"
    table.caption = (
        f"local-index hits {hits} · appends {outcome.appends:,} "
        f"({outcome.appends / run.seconds:,.0f}/s) · conflicts {outcome.conflicts:,} · "
        f"log {replay.records:,} records, {replay.data_bytes / 1e6:.1f} MB"
    )
    return table


def run_demo(
    url: str, application: Application, *, seconds: float, clients: int, seed: int
) -> None:
    """Run a demo as a command: print its table, then exit with a code.

    Raises:
        typer.Exit: with code 1 if the check found a fault. With code 2, and a sentence on standard
            error, if the platform refuses or fails a necessary request.
    """
    console = Console()

    async def shown() -> list[str]:
        outcome = await demonstrate(
            url.rstrip("/"), application, seconds=seconds, clients=clients, seed=seed,
            console=console,
        )  # fmt: skip
        show(application, outcome, console)
        return outcome.faults

    faults = _run(shown())
    if faults:
        sys.stderr.write(f"The check failed:\n{summary_of(faults)}\n")
        raise typer.Exit(1)


def _run(shown: Coroutine[Any, Any, list[str]]) -> list[str]:
    try:
        return uvloop.run(shown)
    except LoadError as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(2) from None
