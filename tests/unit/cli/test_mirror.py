"""`indilog mirror`: how it shows its lag, and how it connects again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from indilog import remote_client
from indilog.base.errors import ConfigError, NotReadyError
from indilog.cli import mirror
from indilog.cli.mirror import LagReport, keep_copying
from indilog.mirror import MirrorProgress
from indilog.testing import MemoryLogs


def test_the_lag_is_shown_at_intervals_and_when_it_exceeds_its_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = LagReport(lag_max_s=5.0)
    for copied, lag_s in ((1, 0.0), (2, 1.0), (3, 6.0), (4, 7.0), (5, 2.0), (6, 1.0)):
        shown(MirrorProgress(copied, 10 * copied, lag_s))
    shown.restarted()
    shown(MirrorProgress(2, 80, 0.0))
    shown.end()
    assert capsys.readouterr().out.splitlines() == [
        "copied 1 records, all below 10; lag 0.0 s",
        "copied 3 records, all below 30; lag 6.0 s; the lag exceeds its limit",
        "copied 5 records, all below 50; lag 2.0 s",
        "copied 8 records, all below 80; lag 0.0 s",
    ]


@pytest.mark.asyncio
async def test_a_platform_that_does_not_answer_is_awaited_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    connected: list[str] = []
    errors: list[Exception] = [NotReadyError("No answer."), NotReadyError("No answer.")]

    @asynccontextmanager
    async def connect(url: str, *, token: str | None) -> AsyncIterator[MemoryLogs]:
        connected.append(url)
        yield MemoryLogs()

    async def copy(source: object, target: object) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(remote_client, "connect", connect)
    await keep_copying("one", "two", copy, LagReport(None))
    assert connected == ["one", "two"] * 3
    assert capsys.readouterr().err == "No answer. The mirror tries again.\n" * 2
    errors.append(ConfigError("The target is another mirror."))
    with pytest.raises(ConfigError):
        await keep_copying("one", "two", copy, LagReport(None))
    monkeypatch.setattr(mirror, "AWAY_S_MAX", -1.0)
    errors.append(NotReadyError("No answer."))
    with pytest.raises(NotReadyError):
        await keep_copying("one", "two", copy, LagReport(None))
