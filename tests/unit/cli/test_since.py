"""Parsing of times of the command line."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from indilog.cli.since import seconds_of

NOW = 1_000_000.0


@pytest.mark.parametrize(
    ("text", "ago"),
    [("0s", 0), ("90s", 90), ("10m", 600), ("1h30m", 5400), ("2d", 172_800), ("1.5h", 5400)],
)
def test_a_duration_means_that_long_ago(text: str, ago: float) -> None:
    assert seconds_of(text, lambda: NOW) == NOW - ago


def test_a_time_before_1970_means_the_start_of_the_log() -> None:
    assert seconds_of("100w", lambda: NOW) == 0.0


def test_a_date_and_time_is_iso_8601_and_local_without_a_zone() -> None:
    there = datetime(2026, 11, 21, 18, 0, tzinfo=UTC)
    assert seconds_of("2026-11-21T18:00Z", lambda: NOW) == there.timestamp()
    local = there.astimezone().replace(tzinfo=None)
    assert seconds_of(local.isoformat(), lambda: NOW) == there.timestamp()


@pytest.mark.parametrize("text", ["", "10", "m", "10 m", "10x", "yesterday", "1h-2m"])
def test_text_that_is_neither_a_duration_nor_a_date_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--since is how long ago"):
        seconds_of(text, lambda: NOW)
