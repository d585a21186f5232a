"""Reads the sources of a deployment: the text files of a Python file, a package or a folder.

`indilog deploy` and `RemoteClient.deploy` call `sources_of`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from indilog.base.errors import DeployError

SOURCES_BYTES_MAX: Final = 4 * 1024 * 1024
"""Largest total size that is read. The limit is above that of any platform. It stops the reading of
a folder that was given by mistake.
"""
_NO_MODULE: Final = re.compile(r"No module named '([\w.]+)'")
_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "venv", "tests"})
_SUFFIXES: Final = frozenset({".py", ".json", ".toml", ".txt", ".md", ".sql", ".html", ".csv"})


def sources_of(path: Path) -> dict[str, str]:
    """Return the text of each file of `path` (a file, a package or a folder) by its relative path.

    The paths of a package's files begin with its name, so that its modules can import each other.
    Hidden, compiled, test and binary files are left out.

    Raises:
        DeployError: `path` does not exist, contains no Python file, or is too large.
    """
    if path.is_file():
        if path.suffix != ".py":
            raise DeployError(f"{path} is not a Python file.")
        return {path.name: _text(path)}
    if not path.is_dir():
        raise DeployError(f"There is no file or folder {path}.")
    root = path.resolve()
    base = root.parent if (root / "__init__.py").exists() else root
    sources: dict[str, str] = {}
    size = 0
    for file in sorted(root.rglob("*")):
        if _is_source(file.relative_to(root)) and file.is_file():
            sources[file.relative_to(base).as_posix()] = text = _text(file)
            size += len(text)
            if size > SOURCES_BYTES_MAX:
                raise DeployError(
                    f"{path} holds more than {SOURCES_BYTES_MAX:,} bytes; leave data files out."
                )
    if not any(name.endswith(".py") for name in sources):
        raise DeployError(f"There is no Python file in {path}.")
    return sources


def with_missing_file(what: Path, problem: str) -> str:
    """Return why `what` could not be deployed; if a single file imports a neighbour, say that the
    folder must be deployed.
    """
    found = _NO_MODULE.search(problem)
    if found is None or not what.is_file():
        return problem
    folder, name = what.resolve().parent, found[1].partition(".")[0]
    if not ((folder / f"{name}.py").is_file() or (folder / name).is_dir()):
        return problem
    return (
        f"{problem} Only {what.name} was deployed, and {name} is beside it; deploy the folder: "
        f"indilog deploy {what.parent}"
    )


def _is_source(relative: Path) -> bool:
    if any(part.startswith(".") or part in _SKIPPED for part in relative.parts):
        return False
    return relative.suffix in _SUFFIXES


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise DeployError(f"{file} cannot be read as text: {error}.") from error
