"""Parsing and printing of quantities."""

from __future__ import annotations

import pytest

from indilog.cli.quantities import duration_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2_592_000.0, "30 days"),
        (86_400.0, "1 day"),
        (5_400.0, "1 hour 30 minutes"),
        (90_061.5, "1 day 1 hour 1 minute 1.5 seconds"),
        (0.25, "0.25 seconds"),
        (0.0, "0 seconds"),
        (864_000_000.0, "10,000 days"),
    ],
)
def test_a_duration_is_printed_in_days_hours_minutes_and_seconds(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
