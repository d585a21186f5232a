"""The commands `indilog schedules`: see, pause and backfill schedules of workflows.

They call the operations `schedules.*` of an application through a `Gateway`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from indilog.cli import show as printed
from indilog.cli.gateway import DEFAULT, Gateway, Url
from indilog.link.access import segment

schedules = typer.Typer(
    help="See, pause and backfill schedules of workflows.", no_args_is_help=True
)

App = Annotated[str, typer.Argument(help="Name of the application.")]
Workflow = Annotated[str, typer.Argument(help="Name of the workflow.")]
_COLUMNS: Final = ("workflow", "schedule", "time zone", "overlap", "state", "next", "open runs")


@schedules.command(name="list")
def list_(
    app: App,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    url: Url = DEFAULT,
) -> None:
    """List the schedules of an application's workflows."""
    found = _operate(url, app, "list", {})
    if as_json:
        printed.value(found)
    else:
        printed.table("Schedules (times are UTC)", _COLUMNS, list(map(_row, found)))


@schedules.command()
def pause(app: App, workflow: Workflow, *, url: Url = DEFAULT) -> None:
    """Start no further runs of a workflow at its due times. Open runs continue."""
    _operate(url, app, "pause", {"workflow": workflow})
    printed.line(f"The schedule of {workflow} is paused.")


@schedules.command()
def resume(app: App, workflow: Workflow, *, url: Url = DEFAULT) -> None:
    """Start runs of a workflow at its due times again."""
    _operate(url, app, "resume", {"workflow": workflow})
    printed.line(f"The schedule of {workflow} is resumed.")


@schedules.command()
def backfill(
    app: App,
    workflow: Workflow,
    start: Annotated[str, typer.Argument(help="First time, such as 2026-11-01T00:00Z.")],
    end: Annotated[str, typer.Argument(help="Time after the last one.")],
    *,
    url: Url = DEFAULT,
) -> None:
    """Start the runs of due times that have passed, except those that have a run already."""
    given = {"workflow": workflow, "start": start, "end": end}
    for started in _operate(url, app, "backfill", given)["ids"]:
        printed.line(started)


def _operate(url: str, app: str, operation: str, given: dict[str, Any]) -> Any:  # noqa: ANN401 - any JSON value
    path = f"/operations/{segment(app)}/schedules.{operation}"
    return Gateway(url).post(path, json=given)


def _row(schedule: dict[str, Any]) -> list[object]:
    return [
        schedule["workflow"],
        schedule["expression"],
        schedule["timezone"],
        schedule["overlap"],
        "paused" if schedule["is_paused"] else "active",
        printed.utc(schedule["next_due"]),
        len(schedule["open_runs"]),
    ]
