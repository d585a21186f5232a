"""The examples of docs/libs/bokiviews.md run unchanged, one after the other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from indilog.testing import MemoryLog

PAGE = Path(__file__).parents[3] / "docs" / "libs" / "bokiviews.md"


@pytest.mark.asyncio
async def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"log": MemoryLog("shop"), "__name__": "page"}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile(block, str(PAGE), "exec", flags=flags, dont_inherit=True)
        if (running := eval(code, names)) is not None:
            await running
    assert capsys.readouterr().out == "('ann', 10)\n"
