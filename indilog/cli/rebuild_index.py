"""The command `rebuild-index`, which works on a data directory without the platform
(docs/decisions/0035 and 0041).

`indilog_pipeline.rebuild` does the work. This module checks the options and prints the results.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from indilog.cli import show
from indilog.cli.gateway import DEFAULT, FAILURE, Gateway, Url, explain_mistakes, stop

if TYPE_CHECKING:
    from indilog.kernel.view import View
    from indilog_pipeline.rebuild.plan import Built, RebuildPlan

Note = Callable[[int, int], None]
_SNAPSHOTS_S_MAX = 120.0
_ASK_AGAIN_S = 3.0
_POLL_S = 0.1


def rebuild_index(
    data: Annotated[Path, typer.Argument(help="The data directory of the platform.")],
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Only compare the snapshots with the records.")
    ] = False,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="With --verify: running index nodes write all they hold first."
        ),
    ] = False,
    url: Url = DEFAULT,
    engine: Annotated[
        Literal["local", "spark"] | None,
        typer.Option(help="One process, or Spark; else the faster one."),
    ] = None,
    master: Annotated[
        str | None, typer.Option(help="Where Spark runs; local[*]: on all cores here.")
    ] = None,
    index_shards: Annotated[
        int | None, typer.Option(min=1, max=1000, help="Change the number of index shards.")
    ] = None,
    anew: Annotated[
        bool,
        typer.Option("--anew", help="With it, distribute all records again, not only later ones."),
    ] = False,
    memory_mib: Annotated[
        int, typer.Option(min=1, help="MiB of memory for rows that one process sorts.")
    ] = 512,
) -> None:
    """Rebuild the snapshots of all index nodes from the records of a data directory.

    Stop the index nodes first; afterwards they start with the rebuilt snapshots. With --verify they
    may run. --url names the platform that runs on DATA; it is needed for --live.
    """
    if live and not verify:
        stop("--live belongs to --verify, which compares what running index nodes hold.")
    if engine == "local" and master is not None:
        stop("--master says where Spark runs; leave it out with --engine local.")
    if anew and index_shards is None:
        stop("--anew needs --index-shards, the number of index shards.")
    if verify:
        if index_shards is not None or engine is not None or master is not None:
            stop("--verify changes nothing: it takes no --engine, --master or --index-shards.")
        if live:
            _request_snapshots(data, url)
        _verify(data, memory_mib << 20)
    else:
        _rebuild(data, engine, master, memory_mib << 20, index_shards, anew=anew)


def _rebuild(
    data: Path,
    asked: Literal["local", "spark"] | None,
    master: str | None,
    memory_bytes_max: int,
    index_shards: int | None,
    *,
    anew: bool,
) -> None:
    with explain_mistakes():
        from indilog_pipeline.rebuild.choice import choose
        from indilog_pipeline.rebuild.run import Sharding, rebuild_index

        def engine(plan: RebuildPlan) -> Mapping[int, Built]:
            start, end = plan.seqnums
            choice = choose(asked, master, end - start, index_shards=len(plan.starts))
            if plan.starts:
                show.line(choice.sentence)
            if choice.engine == "spark" and plan.starts:
                return _on_spark(plan, master or "local[*]")
            return _here(plan, memory_bytes_max)

        sharding = Sharding(index_shards, anew) if index_shards is not None else None
        done = rebuild_index(data, engine, sharding=sharding)
    for one in done:
        index_shard = f"Index shard {one.index_shard}:"
        if one.start == one.position:
            show.line(f"{index_shard} its snapshot of position {one.position:,} is the newest.")
        elif not one.rows:
            show.line(f"{index_shard} no records below position {one.position:,}.")
        else:
            since = f" (since {one.start:,})" if one.start else ""
            show.line(f"{index_shard} {one.rows:,} rows below position {one.position:,}{since}.")
    if index_shards is not None:
        show.line(f"Start the platform with index_shards = {index_shards} from now on.")


def _here(plan: RebuildPlan, memory_bytes_max: int) -> Mapping[int, Built]:
    from indilog_pipeline.rebuild.local import LocalEngine

    with _progress() as note:
        return LocalEngine(note, memory_bytes_max=memory_bytes_max)(plan)


def _on_spark(plan: RebuildPlan, master: str) -> Mapping[int, Built]:
    from indilog_pipeline.rebuild.spark_engine import SparkEngine
    from indilog_pipeline.session import start

    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    progress = str(sys.stderr.isatty()).lower()
    spark = start(
        "indilog rebuild-index",
        master=master,
        settings={"spark.ui.showConsoleProgress": progress, "spark.log.level": "OFF"},
    )
    try:
        return SparkEngine(spark)(plan)
    finally:
        spark.stop()


def _request_snapshots(data: Path, url: str) -> None:
    """Make all index nodes of the platform on `data` write snapshots, and wait for these."""
    from indilog.runtime.cluster.cluster_state import layout_in

    with explain_mistakes():
        view = layout_in(data).view
    gateway = Gateway(url)
    deadline = time.monotonic() + _SNAPSHOTS_S_MAX
    position: int | None = None
    asked_at = -math.inf
    while True:
        if time.monotonic() >= asked_at + _ASK_AGAIN_S:  # a request may be lost between nodes
            found = gateway.post("/index/snapshots")["position"]
            position = found if position is None else position
            asked_at = time.monotonic()
        assert position is not None, "it was asked for"
        missing = _without_snapshot(view, gateway.get_with("nodes", "/status")["nodes"], position)
        if not missing:
            return
        if time.monotonic() >= deadline:
            stop(
                f"No snapshot of position {position:,} within {_SNAPSHOTS_S_MAX:.0f} s from "
                f"{', '.join(missing)}; do they run, and is there room on their disks?",
                FAILURE,
            )
        time.sleep(_POLL_S)


def _without_snapshot(
    view: View, status: Mapping[str, Mapping[str, int]], position: int
) -> list[str]:
    """Return the index nodes whose newest snapshot does not reach a position. An index node without
    records writes no snapshot.
    """
    from indilog.kernel.index_schedule import IndexPositions

    missing: list[str] = []
    for shard, nodes in enumerate(view.index_shards):
        end = min(position, IndexPositions.of(view.eras, shard).end)
        for node in nodes:
            known = status.get(node, {"position": 0, "tail": 1, "snapshot_position": 0})
            empty = known["position"] >= end and not known["tail"]
            if not empty and known["snapshot_position"] < end:
                missing.append(node)
    return missing


def _verify(data: Path, memory_bytes_max: int) -> None:
    with explain_mistakes(), _progress() as note:
        from indilog_pipeline.rebuild.verify import verify_index

        verified = verify_index(data, note, memory_bytes_max=memory_bytes_max)
    compared, found = verified.compared, verified.difference
    for one in compared[:-1] if found is not None else compared:
        show.line(
            f"{one.file} has the rows of the records: {one.rows:,} below position {one.position:,}."
        )
    if found is not None:
        has, wanted = (_row(row) for row in (found.has, found.wanted))
        stop(f"{found.file} differs: it has {has} where the records give {wanted}.", FAILURE)
    if verified.unusable:
        folders = ", ".join(map(str, verified.unusable))
        stop(f"No snapshot in {folders} is intact and of this log; rebuild the index.", FAILURE)
    if not compared and verified.seqnums:
        stop("Nothing was compared: there is no snapshot. Rebuild the index to get some.", FAILURE)
    if not compared:
        show.line("There are no records, and no snapshots.")


def _row(row: tuple[int, int, int] | None) -> str:
    if row is None:
        return "no row"
    return "(tag {:#018x}, seqnum {:,}, shard {})".format(*row)


@contextmanager
def _progress() -> Iterator[Note]:
    """Show on a terminal how many seqnums were read."""
    from rich.console import Console
    from rich.progress import Progress

    hidden = not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=hidden) as progress:
        task = progress.add_task("records", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
