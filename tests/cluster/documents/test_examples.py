"""Each program in `examples/` prints the output of its docstring, on a platform in its process."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cluster.platform_process import ROOT, platform

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
pytestmark = pytest.mark.cluster


def promised(example: Path) -> str:
    """Return the expected output from the docstring of a program."""
    text = ast.get_docstring(ast.parse(example.read_text()))
    assert text is not None
    return textwrap.dedent(text.partition("Prints:\n")[2]).strip()


def test_every_example_prints_the_output_of_its_docstring(tmp_path: Path) -> None:
    assert len(EXAMPLES) >= 5
    with platform(tmp_path) as running:
        for example in EXAMPLES:
            done = subprocess.run(
                [sys.executable, str(example)],
                env={**os.environ, "INDILOG_URL": running.url},
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip() == promised(example), example.name
