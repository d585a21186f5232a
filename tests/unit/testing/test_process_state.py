"""Process-wide changes by one test do not reach the next one."""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from tests.process_state import process_state


def test_process_settings_of_commands_are_restored() -> None:
    before = process_state()
    signal.signal(signal.SIGTERM, lambda *_: None)
    sys.excepthook = lambda *_: None
    logging.getLogger().addHandler(logging.NullHandler())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    assert process_state() != before
    assert before.restore() == []
    assert process_state() == before


def test_a_resource_that_a_test_leaked_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = process_state()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(os.environ, "FORGOTTEN", "1")
    monkeypatch.syspath_prepend(tmp_path)
    assert before.restore() == [
        "the working directory", "the environment", "the path of imports",
    ]  # fmt: skip
