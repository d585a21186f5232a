"""Prints the test files of what differs from `main`: `python -m scripts.changed_tests [BASE]`.

These are the test files that changed, and the quick ones (`QUICK`) that import a changed module.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
QUICK: Final = ("tests/unit", "tests/contract")
"""Folders whose tests take seconds."""
PATHS: Final = (".", "libs", "ordering", "storage", "index_tier", "compute", "cells", "pipeline")
"""Folders that packages are imported from."""


def main() -> None:
    """Print one file a line."""
    base = sys.argv[1] if len(sys.argv) > 1 else "main"
    for test in sorted(tests_of(set(changed_since(base)))):
        print(test)


def changed_since(base: str) -> Iterator[str]:
    """Yield the Python files that differ from where this branch left `base`, and new ones."""
    fork = _git("merge-base", "HEAD", base).strip()
    names = _git("diff", "--name-only", fork) + _git("ls-files", "--others", "--exclude-standard")
    for name in names.splitlines():
        if name.endswith(".py") and (ROOT / name).exists():
            yield name


def tests_of(changed: set[str]) -> set[str]:
    """Return the test files of changed files."""
    tests = {name for name in changed if Path(name).name.startswith("test_")}
    modules = {module for name in changed for module in _modules_of(name)}
    for path in _quick_tests():
        if modules & imports_of(path):
            tests.add(str(path.relative_to(ROOT)))
    return tests


@cache
def _quick_tests() -> list[Path]:
    return [path for folder in QUICK for path in (ROOT / folder).rglob("test_*.py")]


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Return the modules that a file imports, anywhere in it; of `from a import b` also `a.b`."""
    return frozenset(_imports(ast.parse(path.read_text())))


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _modules_of(name: str) -> Iterator[str]:
    """Yield the names under which a file may be imported."""
    for folder in PATHS:
        path = Path(name).with_suffix("")
        if path.is_relative_to(folder):
            parts = path.relative_to(folder).parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _git(*arguments: str) -> str:
    return subprocess.run(  # noqa: S603 fixed words
        ["git", *arguments],  # noqa: S607 whichever git the contributor uses
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip


if __name__ == "__main__":
    main()
