"""The examples of docs/libs/bokistream.md run unchanged, one after the other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from indilog.testing import MemoryLog

PAGE = Path(__file__).parents[3] / "docs" / "libs" / "bokistream.md"


@pytest.mark.asyncio
async def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"log": MemoryLog("events")}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        code = compile(block, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if (running := eval(code, names)) is not None:
            await running
    assert capsys.readouterr().out.splitlines()[:4] == [
        "True", "2 1003 b'order 3'", "3 1004 b'order 4'", "4 1010 b'order 5'",
    ]  # fmt: skip
