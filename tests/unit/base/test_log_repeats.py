"""Repeated log lines are counted; the first line of each kind is always written."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from indilog.base import log_repeats
from indilog.base.log_repeats import Repeats, limited_elsewhere
from indilog.base.telemetry import configure_logging


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


class Log:
    """Keeps the written counts, and the time."""

    def __init__(self, **limits: Any) -> None:  # noqa: ANN401 - of any kind
        self.now = 0.0
        self.logged: list[tuple[str, int]] = []
        self.repeats = Repeats(self._tell, clock=lambda: self.now, **limits)

    def _tell(self, _event: str, *, of: str, count: int, **_: object) -> None:
        self.logged.append((of, count))

    def written(self, event: str, lines: int, level: str = "warning", logger: str = "") -> int:
        return sum(self.repeats.is_written(logger, level, event) for _ in range(lines))


def test_lines_over_the_limit_are_counted_and_the_count_is_logged_after_the_window() -> None:
    log = Log(lines_max=3, window_s=10.0)
    assert log.written("a", 5) == 3
    log.now = 9.9
    assert log.written("a", 2) == 0
    assert log.logged == []
    log.now = 10.0
    assert log.written("a", 1) == 1, "the first one of a window is written"
    assert log.logged == [("a", 4)]


def test_the_next_line_of_any_kind_logs_the_counts_of_closed_windows() -> None:
    log = Log(lines_max=1, window_s=10.0)
    log.written("a", 3)
    log.now = 5.0
    log.written("b", 2)
    log.now = 10.0
    log.written("c", 1)
    assert log.logged == [("a", 2)]
    log.now = 15.0
    log.written("c", 1)
    assert log.logged == [("a", 2), ("b", 1)]


def test_kinds_differ_by_event_level_and_logger() -> None:
    log = Log(lines_max=1)
    for level in ("info", "warning"):
        for logger in ("", "uvicorn.error"):
            for event in ("a", "b"):
                assert log.written(event, 3, level, logger) == 1


def test_remembered_kinds_are_bounded_and_the_count_of_an_evicted_kind_is_logged() -> None:
    log = Log(lines_max=1, kinds_max=10)
    log.written("first", 3)
    assert [log.written(f"kind {number}", 1) for number in range(1_000)] == [1] * 1_000
    assert log.logged == [("first", 2)]
    assert len(log.repeats._windows) == 10


def test_lines_with_a_limit_of_their_own_are_not_counted() -> None:
    log = Log(lines_max=1)
    with limited_elsewhere():
        assert log.written("a", 100) == 100
    assert log.written("a", 2) == 1


@pytest.mark.asyncio
async def test_the_loop_logs_a_count_although_no_further_line_is_logged() -> None:
    logged = asyncio.Event()
    repeats = Repeats(lambda *_, **__: logged.set(), lines_max=1, window_s=0.05)
    for _ in range(3):
        repeats.is_written("", "info", "a")
    await asyncio.wait_for(logged.wait(), 30)


def test_a_process_suppresses_repeated_lines_over_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lines of structlog and of the standard library, with any fields or arguments."""
    now = 0.0
    monkeypatch.setattr(log_repeats, "LINES_MAX", 2)
    out = io.StringIO()
    configure_logging("json", stream=out, clock=lambda: now)
    for number in range(50):
        structlog.get_logger().warning("upload cut", number=number)
        logging.getLogger("uvicorn.error").error("Exception %d", number)
        structlog.get_logger().error("request failed", exc_info=RuntimeError(str(number)))
    now = 61.0
    structlog.get_logger().info("later")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["event"] for line in lines[:3]] == ["upload cut", "Exception 0", "request failed"]
    logged = {line["of"]: line["count"] for line in lines if line["event"] == "log lines left out"}
    assert logged == {"upload cut": 48, "Exception %d": 48, "request failed": 48}
    assert len(lines) == 6 + 3 + 1
