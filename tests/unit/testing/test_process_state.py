"""What one test changes for the whole process does not reach the next one."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from tests.process_state import process_state


def test_what_commands_set_for_their_process_is_put_back() -> None:
    before = process_state()
    signal.signal(signal.SIGTERM, lambda *_: None)
    sys.excepthook = lambda *_: None
    logging.getLogger().addHandler(logging.NullHandler())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    assert process_state() != before
    assert before.put_back() == []
    assert process_state() == before


def test_what_a_test_forgot_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = process_state()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "FORGOTTEN", "1")
    monkeypatch.syspath_prepend(tmp_path)
    assert before.put_back() == [
        "the working directory", "the environment", "the path of imports",
    ]  # fmt: skip
