"""The commands of the pipeline, which read whole logs: `analyse`, `export`.

They call `indilog_pipeline.analytics` and `indilog_pipeline.export`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from indilog.base.ids import MAX_SEQNUM
from indilog.cli import show
from indilog.cli.gateway import explain_mistakes
from indilog.link.access import check_url

Where = Annotated[
    str, typer.Argument(help="A data directory, or a platform's URL.", metavar="DATA|URL")
]


def analyse(
    name: Annotated[
        str, typer.Argument(help="volume, tags, lag, workflows or objects.", metavar="NAME")
    ],
    where: Where,
    *,
    log: Annotated[str | None, typer.Option(help="Only this log; required with a URL.")] = None,
    at: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_SEQNUM, help="Show objects as of this seqnum."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory of the picture.")] = Path(),
    rows: Annotated[int, typer.Option(min=1, max=10_000, help="Rows to show, at most.")] = 20,
    skip_gaps: Annotated[
        bool, typer.Option("--skip-gaps", help="Skip trimmed, lost and corrupt records.")
    ] = False,
    master: Annotated[str, typer.Option(help="Where Spark runs.")] = "local[*]",
) -> None:
    """Analyse logs with Spark: a table, and a picture NAME.svg (docs/SPARK.md)."""
    with explain_mistakes():
        from indilog_pipeline.analytics.jobs import Source, analyse, check_job
        from indilog_pipeline.session import start

        path, url = path_and_url(where)
        source = Source(path, url, log, at, skip_gaps)
        check_job(name, source)
        if url:
            check_url(url)
        picture = _place_of_picture(out, name)
        progress = str(sys.stderr.isatty()).lower()
        logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
        session = start(
            f"indilog analyse {name}",
            master=master,
            short=True,
            settings={"spark.ui.showConsoleProgress": progress, "spark.log.level": "OFF"},
        )
        try:
            report = analyse(session, name, source, rows_max=rows)
        finally:
            session.stop()
        show.table(report.title, report.columns, report.rows)
        if report.has_more:
            show.line(f"There are more rows; --rows shows more than {rows:,}.")
        try:
            picture.write_text(report.svg, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{picture} cannot be written: {error.strerror}.") from error
        show.line(f"The picture is in {picture}.")


def _place_of_picture(out: Path, name: str) -> Path:
    """Make the directory of a picture; return the picture's place.

    Raises:
        ValueError: nothing can be written there. This is known before Spark starts.
    """
    picture = out / f"{name}.svg"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{picture} cannot be written: {error.strerror}.") from error
    if picture.is_dir() or not os.access(out, os.W_OK):
        raise ValueError(f"{picture} cannot be written: give another directory as --out.")
    return picture


def export(
    where: Where,
    log: Annotated[str, typer.Argument(help="The log's name.", metavar="LOG")],
    directory: Annotated[Path, typer.Argument(help="For the Parquet files.", metavar="DIR")],
    *,
    buckets: Annotated[int, typer.Option(min=1, max=1024, help="Number of buckets for tags.")] = 8,
    skip_gaps: Annotated[
        bool, typer.Option("--skip-gaps", help="Skip trimmed, lost and corrupt records.")
    ] = False,
) -> None:
    """Export a log to Parquet files; a later export adds what was appended since."""
    from rich.console import Console
    from rich.progress import Progress

    with explain_mistakes():
        from indilog_pipeline.export import export

        path, url = path_and_url(where)
        console, quiet = Console(stderr=True), not sys.stderr.isatty()
        with Progress(console=console, transient=True, disable=quiet) as progress:
            task = progress.add_task("seqnums")

            def tell(start: int, at: int, end: int) -> None:
                progress.update(task, total=end - start, completed=at - start)

            found = export(
                log,
                directory,
                path=path,
                url=url,
                buckets=buckets,
                skips_gaps=skip_gaps,
                progress=tell,
            )
    show.line(
        f"Exported {found.records:,} records of {log} with seqnums in "
        f"[{found.start}, {found.end}) to {directory}."
    )
    if found.skipped:
        show.line(f"Skipped {found.skipped:,} seqnums of trimmed, lost and corrupt records.")


def path_and_url(where: str) -> tuple[str, str]:
    """Return the data directory, or the URL, that `where` names; the other text is empty."""
    return ("", where) if re.match("https?://", where) else (where, "")
