"""The demo on a running platform: load a graph, run the load, check the result, show a table.

`python -m functions.social.demo --url http://127.0.0.1:8080 --seconds 10 [--graph FILE]`; the app
must be deployed (`indilog deploy functions/social`). Ends with code 1 when the check finds a fault.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from functions.social.check import (
    Replay,
    faults_of_objects,
    faults_of_posts,
    replayed,
    summary_of,
)
from functions.social.graph import Graph, GraphError, friendships, read_graph, synthetic_graph
from functions.social.load import LoadError, Run, load_graph, run_load

_TICK_S: Final = 0.2
_INDEX_PARTS: Final = ("suffix", "popularity_cache", "tag_cache", "answer_cache")
_LAST_ASKED: Final = ("popularity_cache", "answer_cache")
"""What these do not have, the index tier is asked for."""


@dataclass(frozen=True)
class Figures:
    """What the platform says of itself, before and after the load."""

    tail: int
    hits: int
    misses: int


def main(
    url: Annotated[str, typer.Option(help="Where the platform answers.")] = "http://127.0.0.1:8080",
    seconds: Annotated[float, typer.Option(min=0.1, help="How long the load runs.")] = 10.0,
    graph: Annotated[
        Path | None, typer.Option(help="Friendships, two integers a line; else a generated graph.")
    ] = None,
    clients: Annotated[int, typer.Option(min=1, max=1024, help="Clients at once.")] = 64,
    seed: Annotated[int, typer.Option(help="Of all random choices.")] = 1,
) -> None:
    """Run the social network's demo on a platform that is up."""
    try:
        friends = synthetic_graph(seed=seed) if graph is None else read_graph(graph)
        faults = asyncio.run(demonstrated(url.rstrip("/"), friends, seconds, clients, seed))
    except (GraphError, LoadError) as error:
        sys.stderr.write(f"{error}\n")
        raise typer.Exit(2) from None
    if faults:
        sys.stderr.write(f"The check failed:\n{summary_of(faults)}\n")
        raise typer.Exit(1)


async def demonstrated(
    url: str, graph: Graph, seconds: float, clients: int, seed: int
) -> list[str]:
    """Run the demo and print its table; return what the check found wrong."""
    console = Console()
    columns = (TextColumn("{task.description:<22}"), BarColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        await _loaded(progress, url, graph)
        before = await figures(url)
        run = await _ran(progress, url, list(graph), seconds, clients, seed)
        after = await figures(url)
        replay, faults = await _checked(progress, url, run)
    console.print(table_of(run, before, after, replay, clients))
    for name, tally in run.tallies.items():
        for reason, count in tally.failures.most_common(3):
            console.print(f"{name} failed {count} times: {reason}", style="yellow")
    if not faults:
        console.print(
            f"Checked: {len(replay.objects):,} objects equal a replay of the log; "
            f"{len(run.acknowledged):,} acknowledged posts, none lost, none doubled.",
            style="green",
        )
    return faults


async def _loaded(progress: Progress, url: str, graph: Graph) -> None:
    task = progress.add_task("Loading the graph", total=len(graph), note="")

    def tell(people: int) -> None:
        progress.advance(task, people)

    new = await load_graph(url, graph, tell)
    progress.update(
        task,
        note=f"{len(graph):,} people ({new:,} new), {friendships(graph):,} friendships",
    )


async def _ran(
    progress: Progress, url: str, people: list[str], seconds: float, clients: int, seed: int
) -> Run:
    task = progress.add_task(f"{clients} clients at work", total=seconds, note="")
    ticking = asyncio.create_task(_tick(progress, task))
    try:
        run = await run_load(url, people, clients=clients, seconds=seconds, seed=seed)
    finally:
        ticking.cancel()
    note = f"{run.requests:,} requests"
    progress.update(task, completed=seconds, note=note)
    return run


async def _tick(progress: Progress, task: TaskID) -> None:
    began = time.perf_counter()
    while True:
        await asyncio.sleep(_TICK_S)
        progress.update(task, completed=time.perf_counter() - began)


async def _checked(progress: Progress, url: str, run: Run) -> tuple[Replay, list[str]]:
    task = progress.add_task("Checking against the log", total=None, note="")

    def tell(bound: int, tail: int) -> None:
        progress.update(task, completed=bound, total=tail, note=f"{bound:,} of {tail:,} records")

    replay = await replayed(url, tell)
    faults = faults_of_posts(run, replay) + await faults_of_objects(url, replay)
    progress.update(task, note=f"{replay.records:,} records replayed")
    return replay, faults


async def figures(url: str) -> Figures:
    """Ask the platform for its numbers.

    Raises:
        LoadError: it does not answer.
    """
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as client:
            tail = (await client.get("/logs/social/tail")).raise_for_status().json()["tail"]
            status = (await client.get("/status")).raise_for_status().json()
    except httpx.HTTPError as error:
        raise LoadError(f"The platform at {url} does not answer: {error}.") from error
    engine: dict[str, Any] = status.get("engine", {})
    return Figures(
        tail=tail,
        hits=sum(engine.get(part, {}).get("hits", 0) for part in _INDEX_PARTS),
        misses=sum(engine.get(part, {}).get("misses", 0) for part in _LAST_ASKED),
    )


def table_of(run: Run, before: Figures, after: Figures, replay: Replay, clients: int) -> Table:
    """Return what was measured, as a table."""
    table = Table(title=f"functions/social: {clients} clients, {run.seconds:.1f} s")
    for heading in ("function", "requests", "requests/s", "p50 ms", "p99 ms", "failed"):
        table.add_column(heading, justify="left" if heading == "function" else "right")
    for name, tally in run.tallies.items():
        table.add_row(
            name,
            f"{len(tally.latencies_s):,}",
            f"{len(tally.latencies_s) / run.seconds:,.0f}",
            f"{tally.percentile_s(50) * 1000:.2f}",
            f"{tally.percentile_s(99) * 1000:.2f}",
            f"{sum(tally.failures.values()):,}",
        )
    table.add_section()
    table.add_row("all", f"{run.requests:,}", f"{run.requests / run.seconds:,.0f}")
    appends = after.tail - before.tail
    lookups = after.hits + after.misses - before.hits - before.misses
    conflicts = sum(seqnum >= before.tail for seqnum in replay.conflicts)
    hits = f"{(after.hits - before.hits) / lookups:.1%}" if lookups else "no lookups"
    table.caption = (
        f"local-index hits {hits} · appends {appends:,} ({appends / run.seconds:,.0f}/s) · "
        f"conflicts {conflicts:,} · log {replay.records:,} records, "
        f"{replay.data_bytes / 1e6:.1f} MB"
    )
    return table


if __name__ == "__main__":
    typer.run(main)
