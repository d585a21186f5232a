"""The examples of docs/libs/bokiflow.md run unchanged, one after the other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from indilog.testing import MemoryLog

PAGE = Path(__file__).parents[3] / "docs" / "libs" / "bokiflow.md"


@pytest.mark.asyncio
async def test_the_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"log": MemoryLog("orders")}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        code = compile(block, str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if (running := eval(code, names)) is not None:
            await running
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "2 tea: 30",
        "done 2 1",
        "charged 7",
        "tea sent",
        "[]",
        "True ['done', 'done']",
        "4 order-41",
        "part 1 is packed",
        "part 2 is packed",
        "2",
        "3 5",
        "mail to bob",
        "4 3",
        "0",
        "True",
        "Lock 'hotel:7' was not free within 0 s; try again later.",
        "room booked, seat booked, 1",
        "released: seat booked",
        "released: room booked",
        "Run 'order-43' failed: Cancelled: not paid",
    ]
