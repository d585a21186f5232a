"""The commands `indilog backup DATA DESTINATION`, `backup restore` and `backup verify`.

They call `indilog_pipeline.backup`, which reads and writes data directories.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from indilog.base.ids import MAX_SEQNUM
from indilog.cli import show
from indilog.cli.gateway import explain_mistakes, stop


class _CreatesByDefault(TyperGroup):
    """A command group in which `DATA DESTINATION` without a command name means `create`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Insert the command name `create` if it is omitted."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["create", *args]
        return super().parse_args(ctx, args)


backup = typer.Typer(
    cls=_CreatesByDefault, help="Back up a platform, restore a backup.", no_args_is_help=True
)

Source = Annotated[Path, typer.Argument(help="The directory of a backup.", metavar="SOURCE")]


@backup.command()
def create(
    data: Annotated[Path, typer.Argument(help="The data directory.", metavar="DATA")],
    destination: Annotated[Path, typer.Argument(help="A new directory.", metavar="DESTINATION")],
    *,
    part_mib: Annotated[int, typer.Option(min=1, max=4096, help="Size of a file, in MiB.")] = 64,
    without: Annotated[
        list[str] | None,
        typer.Option(help="Leave out a log of another kind, if it is lost. May be repeated."),
    ] = None,
) -> None:
    """Back up a data directory, also while its platform runs (`indilog backup DATA DESTINATION`).

    An interrupted backup continues when the same command runs again.
    """
    with explain_mistakes(), _progress("backup") as progress:
        from indilog_pipeline.backup.create import create

        made = create(
            data,
            destination,
            part_bytes=part_mib << 20,
            without=without or (),
            progress=progress,
        )
    show.line(
        f"Backed up {made.kept:,} records of shared logs, with seqnums below {made.tail}"
        f"{_others(made.segments)}.{_without(made.left_out)}"
    )


@backup.command()
def restore(
    source: Source,
    data: Annotated[Path, typer.Argument(help="A new data directory.", metavar="NEW_DATA")],
    *,
    config: Annotated[Path | None, typer.Option(help="TOML file of the new platform.")] = None,
    processes: Annotated[
        bool, typer.Option("--processes", help="Make it for `indilog up --processes`.")
    ] = False,
    nodes: Annotated[
        int | None, typer.Option(help="Make it for `indilog up --nodes` with so many.")
    ] = None,
    next_seqnum: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_SEQNUM,
            help="First seqnum that the new platform assigns; default: 2^20 above the backup.",
        ),
    ] = None,
) -> None:
    """Make a new platform from a backup; start it with the same settings afterwards."""
    from indilog.config import config_from
    from indilog.runtime.cluster.supervisor import processes_config

    if processes and nodes is not None:
        stop("Choose one of --processes and --nodes.")
    option = " --processes" if processes else "" if nodes is None else f" --nodes {nodes}"
    with explain_mistakes(), _progress("restore") as progress:
        from indilog_pipeline.backup.restore import restore

        given = (config, os.environ, {"node": {"data_dir": data}})
        made = restore(
            source,
            processes_config(*given, shared=nodes) if option else config_from(*given),
            "processes" if option else "embedded",
            next_seqnum=next_seqnum,
            progress=progress,
        )
    show.line(
        f"Restored {made.kept:,} records of shared logs{_others(made.segments)}. The next seqnum "
        f"of shared logs is {made.next_seqnum}. Start it with `indilog up{option} --data {data}`."
        f"{_without(made.left_out)}"
    )


@backup.command()
def verify(source: Source) -> None:
    """Check every file of a backup."""
    with explain_mistakes():
        from indilog_pipeline.backup.files import verify

        plan, manifest = verify(source)
    show.line(
        f"The backup is whole: {manifest.kept:,} records of shared logs, with seqnums below "
        f"{plan.tail}{_others(manifest.copied)}.{_without(manifest.left_out)}"
    )


def _others(segments: int) -> str:
    """Return how many segments of logs of other kinds there are, as the end of a sentence."""
    parts = "segment" if segments == 1 else "segments"
    return f", and {segments:,} {parts} of logs of other kinds" if segments else ""


def _without(logs: Sequence[str]) -> str:
    """Return which logs were left out, as a further sentence."""
    return f" Left out: {', '.join(logs)}." if logs else ""


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    quiet = not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task(name)

        def progress(done: int, total: int) -> None:
            bar.update(task, total=total, completed=done)

        yield progress
