"""The page about the mechanisms of the papers names files, tests and benchmarks that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reproduction" / "coverage.md"
VERDICTS = ("**Differs**", "**Left out**", "**Missing**")


def rows() -> list[list[str]]:
    """Return the cells of all rows of all tables, without the heads."""
    found = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ")
    ]
    return [cells for cells in found if cells[2] != "where it is"]


def spans() -> list[str]:
    """Return what the page has as code."""
    return re.findall(r"`([^`]+)`", PAGE.read_text())


@cache
def names_in(file: str) -> frozenset[str]:
    """Return the classes, functions and attributes of a file, as `name` or `Class.name`."""
    return frozenset(_names(ast.parse((ROOT / file).read_text()).body))


def _names(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node.name
            yield from (f"{node.name}.{name}" for name in _names(node.body))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target)
        elif isinstance(node, ast.Assign):
            yield from map(ast.unparse, node.targets)


def test_every_row_says_where_or_why_not() -> None:
    assert len(rows()) > 100
    for cells in rows():
        assert len(cells) == 4, cells
        where, shown = cells[2:]
        assert where, cells
        if not where.startswith(VERDICTS):
            assert shown, f"{cells[1]}: built, and shown by nothing"
        if where.startswith("**Missing**:"):
            assert not shown, f"{cells[1]}: missing, and shown by something"


def test_all_files_and_names_exist() -> None:
    named = [span.partition("::") for span in spans() if re.match(r"[\w.-]+/", span)]
    assert len(named) > 150
    missing = [
        f"{file}::{name}"
        for file, _, name in named
        if not (ROOT / file).exists() or (name and name not in names_in(file))
    ]
    assert not missing


def test_all_benchmarks_and_their_options_exist() -> None:
    benchmarks = [span for span in spans() if span.startswith("bench.")]
    assert len(benchmarks) > 30
    for command in benchmarks:
        module, *options = command.split()
        file = ROOT / f"{module.replace('.', '/')}.py"
        assert file.exists(), command
        text = file.read_text()
        assert f"python -m {module}" in text, command
        for option in options:
            assert re.sub(r"^\d+$", "", option) in text, command
