"""The examples of docs/guides work as written: files are imported, tests run, programs end."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from indilog.config import config_from

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Return language, file name and text of each block of code; most have no file name."""
    return [(m[1], m[2] or "", m[3]) for m in _BLOCK.finditer(page.read_text())]


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_guide_begins_with_an_example(page: Path) -> None:
    named = [name for _, name, _ in blocks(page) if name]
    assert named, "a guide has files that a reader can paste"
    first = page.read_text().index("```")
    assert page.read_text()[:first].count("\n## ") == 0, "the example comes before the sections"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_files_of_a_guide_work(page: Path, tmp_path: Path) -> None:
    for language, name, text in blocks(page):
        if language == "python":
            ast.parse(text)
        if name:
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    settings = sorted(tmp_path.rglob("*.toml"))
    for file in settings:
        config_from(file)
    tests = [str(file) for file in tmp_path.rglob("test_*.py")]
    assert tests or settings, "a guide's example is checked"
    if not tests:
        return
    # Other installed plugins take half of the time of such a short run.
    options = ("-q", "-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--import-mode=prepend", *tests],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
