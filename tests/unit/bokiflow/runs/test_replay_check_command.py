"""`python -m bokiflow replay-check` without a platform."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

import indilog
from bokiflow import Flow
from bokiflow.__main__ import commands
from indilog import NotReadyError


@pytest.mark.parametrize(("words", "asked"), [([], ()), (["--url", "there"], ("there",))])
def test_the_command_asks_the_platform_at_its_url_or_the_one_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], asked: tuple[str, ...]
) -> None:
    reviewed = ModuleType("reviewed")
    reviewed.__dict__["flow"] = Flow("shop")
    monkeypatch.setitem(sys.modules, "reviewed", reviewed)
    (tmp_path / "reviewed.py").touch()

    def connect(*urls: str) -> None:
        assert urls == asked
        raise NotReadyError("No platform answers.")

    monkeypatch.setattr(indilog, "connect", connect)
    command = ["replay-check", "shop", str(tmp_path / "reviewed.py"), *words]
    ended = CliRunner().invoke(commands, command, env={"INDILOG_URL": None})
    assert (ended.exit_code, ended.stderr) == (1, "No platform answers.\n")
