"""Reads of a run: the position they reach, and their retries while the log is unavailable."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from bokiflow.operations import calls, transactions
from bokiflow.runs import run_log, waiting
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import (
    ChildEnded,
    RunFinished,
    RunRecord,
    RunStarted,
    StepDecided,
    encode,
    run_tag,
)
from bokiflow.runs.run_log import PATIENCE_TRIES, read_run, retry_while_unavailable
from bokiflow.runs.run_state import RunState
from indilog.base.errors import NotReadyError
from indilog.testing import MemoryLogs
from tests.support.hooked_log import HookedLog, Read

pytestmark = pytest.mark.asyncio


class CountedLog(HookedLog):
    """A log that counts the pages that it was asked for."""

    pages = 0

    async def before_read(self, read: Read) -> None:
        self.pages += read.is_page


async def log_with(records: Sequence[tuple[str, RunRecord]]) -> CountedLog:
    log = CountedLog("shop/flow", logs=MemoryLogs())
    for run, record in records:
        await log.append(encode(record), tags=[run_tag(run)])
    return log


STARTED: RunRecord = RunStarted("two", b"{}", "me", "v")
STEPS: list[RunRecord] = [StepDecided(1, f"{n}", "step", "step", b"1") for n in (1, 2, 3)]


async def test_a_run_is_read_up_to_the_place_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pages, and not asked once more when the place is reached."""
    monkeypatch.setattr(run_log, "_PAGE", 2)
    log = await log_with([("r", record) for record in [STARTED, *STEPS]])
    run = await read_run(log, "r", RunState(), 3)
    assert (sorted(run.steps), log.pages) == (["1", "2", "3"], 2)


async def test_a_run_without_the_record_that_was_appended_to_it_is_an_error() -> None:
    """The log ends before it, or the record at that place is of another run."""
    log = await log_with(
        [("child", STARTED), ("child", RunFinished(1, b"1")), ("p", ChildEnded("c"))]
    )
    for own in (2, 3):
        with pytest.raises(NotReadyError, match=f"without the record at {own}"):
            await read_run(log, "child", RunState(), own)
    assert (await read_run(log, "child", RunState(), 1)).finished is not None


async def test_without_a_place_everything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "_PAGE", 2)
    log = await log_with([("r", record) for record in [STARTED, *STEPS]])
    assert sorted((await read_run(log, "r", RunState())).steps) == ["1", "2", "3"]


class Away:
    """A log, function or store that is never there; it counts who asks."""

    tries = 0
    name = "app.f"

    async def ask(self, *_: object, **__: object) -> bytes:
        self.tries += 1
        raise NotReadyError("starting")

    run = transact = ask


ASKS: dict[str, Callable[[Any], Awaitable[object]]] = {
    "log": lambda away: retry_while_unavailable(away.ask),
    "call": lambda away: calls._call_with_retry(away, away, "key", "holder"),
    "transaction": lambda away: transactions._transact_with_retry(away, away.ask, "id"),
}


@pytest.mark.parametrize("what", ASKS)
async def test_the_last_attempt_is_not_followed_by_a_pause(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses come only between attempts, and last 25 s in all."""
    away, pauses = Away(), list[float]()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(waiting, "pause", pause)
    with pytest.raises(Stopped):
        await ASKS[what](away)
    assert len(pauses) == away.tries - 1
    if what != "transaction":
        assert away.tries == PATIENCE_TRIES
        assert round(sum(pauses)) == 25
