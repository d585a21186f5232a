"""Writes the tables of docs/CONFIGURATION.md from `indilog.config` itself.

`python -m tests.support.settings_table --write` renews the document; `tests/test_tidy.py` fails
while it differs from the code. What a setting means is the text under its field; a name that says
it all, unit included, has none.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from indilog import config

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "CONFIGURATION.md"
PARTS = {"ClusterConfig": "INDILOG_CLUSTER_", "NodeConfig": "INDILOG_NODE_"}


def rows_of(part: str) -> Iterator[str]:
    """Yield a table row for each field of a part of the configuration."""
    assert config.__file__ is not None
    tree = ast.parse(Path(config.__file__).read_text())
    (body,) = (n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == part)
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        assert node.value is not None, "every setting has a default"
        cells = [ast.unparse(node.annotation), ast.unparse(node.value), _text(after)]
        cells = [cell.replace("|", "\\|") for cell in cells]
        yield f"| `{node.target.id}` | `{cells[0]}` | `{cells[1]}` | {cells[2]} |"


def _text(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def renewed(document: str) -> str:
    """Return the document with the tables that the code gives now."""
    for part in PARTS:
        begin, end = f"<!-- begin {part} -->", f"<!-- end {part} -->"
        head, opened, rest = document.partition(begin)
        _, closed, tail = rest.partition(end)
        if not (opened and closed):
            raise ValueError(f"docs/CONFIGURATION.md has no place for {part}: {begin} ... {end}")
        table = "\n".join(["| setting | type | default | meaning |", "|---|---|---|---|"])
        document = f"{head}{begin}\n" + "\n".join([table, *rows_of(part)]) + f"\n{end}{tail}"
    return document


def main() -> None:
    """Write the document, or show that it is old."""
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
