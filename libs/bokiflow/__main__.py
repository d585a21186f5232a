"""`python -m bokiflow replay-check APP FILE`: check before a deployment whether the code of a file
continues the open runs of a deployed application.

An error is one sentence on standard error. The exit code is 0 if the code continues all runs, 1 if
a run would be parked or the platform did not answer, and 2 for a mistake in the command.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import indilog
from bokiflow.flow import Flow
from bokiflow.replay_check import ReplayMismatch

commands = typer.Typer(
    help="Check workflows against the runs of a running platform.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@commands.callback()
def main() -> None:
    """Check workflows against the runs of a running platform."""


@commands.command(name="replay-check")
def replay_check(
    app: Annotated[str, typer.Argument(help="Name of the deployed application.", metavar="APP")],
    file: Annotated[Path, typer.Argument(help="The file with its new code.", metavar="FILE")],
    *,
    limit: Annotated[
        int, typer.Option(help="Check at most so many running and parked runs of a flow.", min=1)
    ] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    url: Annotated[
        str | None,
        typer.Option(envvar="INDILOG_URL", help="URL of the platform; default: port 8080."),
    ] = None,
) -> None:
    """Print the open runs that the code of FILE does not continue, with the first difference.

    The code is imported, and replayed against the decided outcomes. No step is executed, and
    nothing is written.
    """
    flows = _flows_in(file, app)
    try:
        mismatches = asyncio.run(_check(flows, app, limit, url))
    except indilog.IndilogError as error:
        _stop(str(error), 1 if error.retryable else 2)
    except ValueError as error:
        _stop(str(error), 2)
    for found in mismatches:
        typer.echo(json.dumps(found._asdict()) if as_json else f"{found.run}: {found.reason}")
    if mismatches:
        raise typer.Exit(1)
    if not as_json:
        typer.echo(f"The checked open runs of {app} continue with this code.")


def _flows_in(file: Path, app: str) -> list[Flow]:
    """Import a file, and return the flows of its application, as if it were deployed as `app`."""
    if file.suffix != ".py" or not file.is_file():
        _stop(f"{file} is no Python file.", 2)
    if not file.stem.isidentifier():
        _stop(f"{file.name} cannot be imported: rename it to a Python name.", 2)
    sys.path.insert(0, str(file.resolve().parent))
    try:
        module = importlib.import_module(file.stem)
    except Exception as error:  # noqa: BLE001 - code of a user may raise anything
        _stop(f"{file} cannot be imported: {type(error).__name__}: {error}", 2)
    finally:
        sys.path.pop(0)
    for value in vars(module).values():
        if isinstance(value, indilog.App):
            value.name = app
    flows = [value for value in vars(module).values() if isinstance(value, Flow)]
    if not flows:
        _stop(f"{file} has no bokiflow.Flow as a global variable.", 2)
    return list(dict.fromkeys(flows))


async def _check(flows: list[Flow], app: str, limit: int, url: str | None) -> list[ReplayMismatch]:
    found: list[ReplayMismatch] = []
    async with indilog.connect(*([] if url is None else [url])) as client:
        await client.runs(app, limit=1)  # raises if there is no such application
        for flow in flows:
            flow.attach(client)
            found += await flow.check_replay(limit=limit)
    return found


def _stop(sentence: str, code: int) -> NoReturn:
    sys.stderr.write(f"{sentence}\n")
    raise typer.Exit(code)


if __name__ == "__main__":
    commands(prog_name="python -m bokiflow")
