"""The examples of docs/libs/bokiqueue.md run unchanged, one after the other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from indilog.testing import MemoryLog

PAGE = Path(__file__).parents[3] / "docs" / "libs" / "bokiqueue.md"


class CreatingClient:
    """A client whose created logs are in memory."""

    async def create_log(self, name: str, kind: str) -> None:
        assert (name, kind) == ("mail", "owned")

    def log(self, name: str) -> MemoryLog:
        return MemoryLog(name)


@pytest.mark.asyncio
async def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"log": MemoryLog("orders"), "client": CreatingClient()}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        code = compile(block, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if (running := eval(code, names)) is not None:
            await running
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] in {"b'to ann' 1", "b'to bob' 1", "b'to cid' 1"}
    left = "4" if printed[0] == "b'to bob' 1" else "3"  # bob's message is released
    assert printed[1].split()[:3] == [left, "0", "0"]
    assert len(printed) == 2 + int(left)
