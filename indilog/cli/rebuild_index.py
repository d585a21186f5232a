"""The command `rebuild-index`: it works on a data directory, without the platform (decision
0035).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from indilog.cli import show
from indilog.cli.gateway import FAILURE, explain_mistakes, stop

Note = Callable[[int, int], None]


def rebuild_index(
    data: Annotated[Path, typer.Argument(help="The data directory of the platform.")],
    *,
    verify: Annotated[
        bool, typer.Option("--verify", help="Only compare the snapshots with the records.")
    ] = False,
    memory_mib: Annotated[
        int, typer.Option(min=1, help="MiB of memory for rows that are sorted.")
    ] = 512,
) -> None:
    """Rebuild the snapshots of all index nodes from the records of a data directory.

    Stop the index nodes before; they start with the rebuilt snapshots. With --verify they may run.
    """
    if verify:
        _verify(data, memory_mib << 20)
    else:
        _rebuild(data, memory_mib << 20)


def _rebuild(data: Path, memory_bytes_max: int) -> None:
    from indilog_pipeline import rebuild

    with explain_mistakes(), _progress() as note:
        done = rebuild.rebuild_index(data, note, memory_bytes_max=memory_bytes_max)
    for one in done:
        index_shard = f"Index shard {one.index_shard}:"
        if one.start == one.position:
            show.line(f"{index_shard} its snapshot of position {one.position:,} is the newest.")
        elif not one.rows:
            show.line(f"{index_shard} no records below position {one.position:,}.")
        else:
            since = f" (since {one.start:,})" if one.start else ""
            show.line(f"{index_shard} {one.rows:,} rows below position {one.position:,}{since}.")


def _verify(data: Path, memory_bytes_max: int) -> None:
    from indilog_pipeline import rebuild

    with explain_mistakes(), _progress() as note:
        compared, found = rebuild.verify_index(data, note, memory_bytes_max=memory_bytes_max)
    for file in compared[:-1] if found is not None else compared:
        show.line(f"{file} has the rows of the records.")
    if found is not None:
        has, wanted = (_row(row) for row in (found.has, found.wanted))
        stop(f"{found.file} differs: it has {has} where the records give {wanted}.", FAILURE)
    if not compared:
        show.line("There is no snapshot to compare.")


def _row(row: tuple[int, int, int] | None) -> str:
    if row is None:
        return "no row"
    return "(tag {:#018x}, seqnum {:,}, shard {})".format(*row)


@contextmanager
def _progress() -> Iterator[Note]:
    """Show on a terminal how many seqnums were read."""
    hidden = not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=hidden) as progress:
        task = progress.add_task("records", total=None)
        yield lambda done, end: progress.update(task, completed=done, total=end)
