"""The output of commands: tables by Rich for people, JSON for programs.

All commands print with these functions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported where a table is printed: other commands start in half the time
    from rich.text import Text

_DATA_SHOWN_MAX = 200
_TEXT_WIDTH_MIN = 16
_WIDTH_MAX = 10_000


def line(text: str) -> None:
    """Print a line of plain text, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def value(given: object) -> None:
    """Print a JSON value; text is printed unquoted."""
    line(given if isinstance(given, str) else json.dumps(given, indent=2, ensure_ascii=False))


def records(given: Sequence[Mapping[str, Any]], *, as_json: bool, time: str = "time") -> None:
    """Print records, one per line; `time` names the printed time (`time` or `ordered_at`)."""
    if as_json:
        for record in given:
            line(json.dumps(record, ensure_ascii=False))
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for record in given:
        console.print(_record(record, time))


def _record(record: Mapping[str, Any], which: str) -> Text:
    from rich.text import Text

    time = utc(record[which])
    data = record.get("data")
    shown = data if data is not None else f"base64 {record['data_base64']}"
    if len(shown) > _DATA_SHOWN_MAX:
        shown = f"{shown[:_DATA_SHOWN_MAX]}… ({len(shown):,} characters)"
    return Text.assemble(
        (f"{record['seqnum']:>8}", "bold"),
        (f"  {time}  ", "dim"),
        (" ".join(map(str, record["tags"])), "cyan"),
        "  ",
        shown.replace("\n", "\\n"),
    )


def apps(given: Sequence[Mapping[str, Any]]) -> None:
    """Print the deployed applications."""
    if not given:
        line("Nothing is deployed; try `indilog deploy FILE`.")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("function", "arguments", "what it does", box=None, pad_edge=False)
    for app in given:
        table.add_row(
            f"[bold]{app['name']}[/bold]",
            "",
            f"[dim]version {app['version']}, {app['owner']}[/dim]",
        )
        for function in app["functions"]:
            names = ", ".join(function["arguments"].get("properties", {}))
            table.add_row(f"  .{function['name']}", names, Text(function["doc"].partition("\n")[0]))
        for schedule in app.get("schedules", ()):
            when = f"called at {schedule['expression']} ({schedule['timezone']})"
            table.add_row(f"  .{schedule['function']}", "", f"[dim]{when}[/dim]")
        for service in app.get("services", ()):
            table.add_row(f"  .{service}", "", "[dim]a service, in every worker[/dim]")
    Console(highlight=False).print(table)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a title, and rows as a table.

    Numbers stand on the right and are never broken. Text is broken where the terminal ends, but
    keeps `_TEXT_WIDTH_MIN` characters. In a pipe or a file each row has one line.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False)
    console = Console(highlight=False)
    cells = [[_cell(cell) for cell in row] for row in rows]
    for place, name in enumerate(columns):
        is_number = any(isinstance(row[place], int | float) for row in rows)
        widest = max(len(name), *(len(row[place]) for row in cells)) if cells else len(name)
        shown.add_column(
            name,
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=is_number or not console.is_terminal,
            min_width=max(len(name), min(widest, _TEXT_WIDTH_MIN)),
        )
    for row in cells:
        shown.add_row(*map(Text, row))
    wanted = console.measure(shown, options=console.options.update(width=_WIDTH_MAX))
    needed = wanted.minimum if console.is_terminal else wanted.maximum
    line(title)
    console.width = max(console.width, needed)
    console.print(shown, crop=False)


def _cell(cell: object) -> str:
    if isinstance(cell, datetime):
        return f"{cell:%Y-%m-%d %H:%M}"
    if isinstance(cell, list | tuple):
        return " ".join(map(str, cell))
    shown = _shown(cell)
    return shown if len(shown) <= _DATA_SHOWN_MAX else f"{shown[:_DATA_SHOWN_MAX]}…"


def utc(seconds: float | None) -> str:
    """Return a time (seconds since 1970) as text; empty for None."""
    if seconds is None:
        return ""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def pairs(given: Mapping[str, str]) -> None:
    """Print names and what they stand for, one pair per line."""
    from rich.console import Console
    from rich.text import Text

    widest = max(map(len, given))
    console = Console(highlight=False, soft_wrap=True)
    for name, text in given.items():
        console.print(Text.assemble((f"{name:{widest}}", "bold"), "  ", text))


def status(found: Mapping[str, Any]) -> None:
    """Print a platform's status, one table per part."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    parts = {name: part for name, part in found.items() if isinstance(part, Mapping)}
    plain = {name: part for name, part in found.items() if not isinstance(part, Mapping)}
    for title, part in ({"platform": plain} | parts).items():
        table = Table(
            title=title, title_justify="left", title_style="bold", box=None, show_header=False
        )
        for name, number in _flat(part):
            table.add_row(name, number)
        if table.row_count:
            console.print(table)


def _flat(part: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, number in part.items():
        if isinstance(number, Mapping):
            rows += _flat(number, f"{prefix}{name}.")
        elif isinstance(number, list):
            rows += [(f"{prefix}{name}[{i}]", _shown(item)) for i, item in enumerate(number)]
        else:
            rows.append((prefix + name, _shown(number)))
    return rows


def _shown(number: object) -> str:
    if isinstance(number, Mapping):
        return ", ".join(f"{name} {_shown(inner)}" for name, inner in number.items())
    if isinstance(number, bool) or number is None:
        return {True: "yes", False: "no", None: "-"}[number]
    if isinstance(number, int):
        return f"{number:,}"
    return f"{number:,.3f}" if isinstance(number, float) else str(number)
