"""Generates the tables of docs/PROTOCOL.md from the docstrings of the messages.

`python -m tests.support.protocol_table --write` updates the document; `tests/test_tidy.py` fails
while it differs from the code. A message is a struct whose docstring begins `sender → receiver:
meaning.` and describes the effects of loss (`Lost:`) and repetition (`Repeated:`).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import msgspec

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "PROTOCOL.md"
MODULES = (
    "indilog.wire.messages",
    "indilog.wire.sequencer_messages",
    "indilog.wire.tag_messages",
    "indilog.wire.base_messages",
    "indilog.wire.replica_messages",
    "indilog.wire.order_lookup_messages",
    "indilog.wire.conditional_messages",
    "indilog.wire.cell_messages",
    "indilog.wire.owner_messages",
    "indilog.wire.growth_messages",
    "indilog.link.link_messages",
    "indilog.link.retention_messages",
    "indilog.link.worker_messages",
)
"""Modules that define messages; each has a marked section in the document."""

_SAYS = re.compile(r"(?P<sender>[^→:]+) → (?P<receiver>[^:]+): (?P<meaning>.+)", re.DOTALL)


class Row(NamedTuple):
    """One message, as its docstring describes it."""

    name: str
    sender: str
    receiver: str
    meaning: str
    lost: str
    repeated: str


def row_of(kind: type) -> Row | None:
    """Parse a message's docstring; None: the class is not a message.

    Raises:
        ValueError: the docstring of the message lacks the effect of loss or repetition.
    """
    doc = inspect.cleandoc(kind.__doc__ or "")
    summary, _, rest = doc.partition("\n\n")
    says = _SAYS.fullmatch(_one_line(summary))
    if says is None:
        return None
    parts = re.split(r"^(Lost|Repeated):", rest, flags=re.MULTILINE)
    facts = dict(zip(parts[1::2], map(_one_line, parts[2::2]), strict=True))
    if not (facts.get("Lost") and facts.get("Repeated")):
        raise ValueError(f"{kind.__name__} does not say what if it is Lost: or Repeated:")
    return Row(
        kind.__name__,
        says["sender"],
        says["receiver"],
        says["meaning"],
        facts["Lost"],
        facts["Repeated"].partition("Attributes:")[0].strip(),
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def messages_of(module: ModuleType) -> list[type]:
    """Return the public structs that a module defines, in the order of its text."""
    return [
        value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]


def table_of(module: ModuleType) -> str:
    """Return a module's messages as a Markdown table."""
    rows = [row for kind in messages_of(module) if (row := row_of(kind)) is not None]
    lines = [
        "| message | from | to | says | if lost | if repeated |",
        "|---|---|---|---|---|---|",
        *(f"| `{row[0]}` | " + " | ".join(_cell(cell) for cell in row[1:]) + " |" for row in rows),
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def renewed(document: str) -> str:
    """Return the document with tables generated from the current code."""
    for name in MODULES:
        if importlib.util.find_spec(name) is None:
            continue
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        head, opened, rest = document.partition(begin)
        _, closed, tail = rest.partition(end)
        if not (opened and closed):
            raise ValueError(f"docs/PROTOCOL.md has no place for {name}: {begin} ... {end}")
        table = table_of(importlib.import_module(name))
        document = f"{head}{begin}\n{table}\n{end}{tail}"
    return document


def main() -> None:
    """Write the document, or fail if it is outdated."""
    old = DOCUMENT.read_text()
    new = renewed(old)
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(new)
    elif old != new:
        raise SystemExit("docs/PROTOCOL.md is old: python -m tests.support.protocol_table --write")


if __name__ == "__main__":
    main()
