"""Generates the tables of docs/CONFIGURATION.md from `indilog.config`.

`python -m tests.support.settings_table --write` updates the document; `tests/test_tidy.py` fails
while it differs from the code. The meaning of a setting is the docstring of its field.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

from indilog.config import ClusterConfig, NodeConfig
from indilog.config.node import GROUPS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "CONFIGURATION.md"
_HEAD = ["| setting | type | default | meaning |", "|---|---|---|---|"]


def rows_of(part: type) -> Iterator[str]:
    """Yield a table row for each setting that a class of `indilog.config` has."""
    (definition,) = ast.parse(inspect.getsource(part)).body
    assert isinstance(definition, ast.ClassDef)
    body = definition.body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if node.target.id in GROUPS or "ClassVar" in ast.unparse(node.annotation):
            continue
        assert node.value is not None, "every setting has a default"
        cells = [ast.unparse(node.annotation), ast.unparse(node.value), _text(after)]
        assert cells[2], f"{node.target.id} has no docstring"
        cells = [cell.replace("|", "\\|") for cell in cells]
        yield f"| `{node.target.id}` | `{cells[0]}` | `{cells[1]}` | {cells[2]} |"


def _text(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def _tables() -> Iterator[tuple[str, list[str]]]:
    """Yield each generated part of the document: its name and its lines."""
    yield "ClusterConfig", [*_HEAD, *rows_of(ClusterConfig)]
    lines = ["### `[node]`", "", *_HEAD, *rows_of(NodeConfig)]
    for name, group in GROUPS.items():
        lines += ["", f"### `[node.{name}]`", "", inspect.getdoc(group) or "", ""]
        lines += [*_HEAD, *rows_of(group)]
    yield "NodeConfig", lines


def renewed(document: str) -> str:
    """Return the document with tables generated from the current code."""
    for part, lines in _tables():
        begin, end = f"<!-- begin {part} -->", f"<!-- end {part} -->"
        head, opened, rest = document.partition(begin)
        _, closed, tail = rest.partition(end)
        if not (opened and closed):
            raise ValueError(f"docs/CONFIGURATION.md has no place for {part}: {begin} ... {end}")
        document = f"{head}{begin}\n" + "\n".join(lines) + f"\n{end}{tail}"
    return document


def main() -> None:
    """Write the document, or fail if it is outdated."""
    old = DOCUMENT.read_text()
    new = renewed(old)
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(new)
    elif old != new:
        raise SystemExit(
            "docs/CONFIGURATION.md is old: python -m tests.support.settings_table --write"
        )


if __name__ == "__main__":
    main()
