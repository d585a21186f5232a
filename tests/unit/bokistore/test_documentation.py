"""The examples of docs/libs/bokistore.md run unchanged, one after the other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from indilog.testing import MemoryLog

PAGE = Path(__file__).parents[3] / "docs" / "libs" / "bokistore.md"


@pytest.mark.asyncio
async def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"log": MemoryLog("shop")}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 8
    for block in blocks:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile(block, str(PAGE), "exec", flags=flags, dont_inherit=True)
        if (running := eval(code, names)) is not None:
            await running
    end, digest = capsys.readouterr().out.split()
    assert int(end) > 10
    assert len(digest) == 64
