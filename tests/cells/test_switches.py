"""Logs that are switched between kinds under load, by seeds; planted bugs.

`--seeds N` runs more seeds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest

from indilog.base.ids import SeqNum
from indilog_compute.log_kinds import catalog_records, segmented_log
from indilog_compute.log_kinds.route import Route
from indilog_compute.log_kinds.segments import LogSegment, bridged
from tests.cells.switching import Switching, check, platform_with, slowed
from tests.support.repeated import first_of

pytestmark = pytest.mark.asyncio

SEEDS = 4
PLATFORM_SEEDS = 25
"""Seeds that share one platform."""
CAUGHT_WITHIN = 100
"""Seeds that a planted bug may survive; up to 11 were seen."""
LEAST = {"records": 20, "conditions": 2, "reads": 20, "times": 2}
"""What happens at least, for each seed on average."""
PAUSES_S = [0.0] * 7 + [0.01, 0.03, 0.08]


@pytest.mark.heavy
@pytest.mark.timeout(7200)
async def test_callers_notice_no_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds_wanted: int | None
) -> None:
    slowed(monkeypatch, partial(random.Random(1).choice, PAUSES_S))
    wanted = until = seeds_wanted or SEEDS
    seen: Counter[str] = Counter()
    seed = 0
    while seed < until:
        async with platform_with(tmp_path / str(seed)) as platform:
            for seed in range(seed, min(seed + PLATFORM_SEEDS, until)):  # noqa: B020 - continues
                switching = Switching(seed, platform)
                history = await switching.run()
                assert not check(history), f"seed {seed}: {check(history)[:5]}"
                assert history.kinds == switching.kinds
                seen["records"] += len(history.final)
                seen["conditions"] += sum(a.known is not None for a in history.appends if a.ended)
                seen["reads"] += len(history.reads)
                seen["times"] += len(history.times)
        seed += 1
        enough = all(seen[what] > least * wanted for what, least in LEAST.items())
        if seed == until and not enough:  # on a busy machine, a switch may be over first
            assert until < 10 * wanted, f"too little happened: {seen}"
            until += wanted


def _acknowledging(patch: pytest.MonkeyPatch) -> None:
    async def settled(
        self: segmented_log.SegmentedLog,
        number: SeqNum,
        placed: Sequence[SeqNum],
        _deadline: float | None = None,
    ) -> list[SeqNum]:
        segment = self._route.segment(number)
        assert segment is not None
        return [segment.seqnum(each) for each in placed]

    patch.setattr(segmented_log.SegmentedLog, "settled", settled)


def _appending(patch: pytest.MonkeyPatch) -> None:
    async def wait_until_open(_self: Route, _deadline: float) -> None:
        return None

    patch.setattr(Route, "wait_until_open", wait_until_open)
    patch.setattr(Route, "is_open_since", lambda _self, _last: True)


def _small(patch: pytest.MonkeyPatch) -> None:
    def small(
        last: LogSegment, *, local_end: SeqNum, time: float, to: LogSegment
    ) -> tuple[LogSegment, LogSegment]:
        closed, new = bridged(last, local_end=local_end, time=time, to=to)
        return closed, msgspec.structs.replace(new, start=new.start - 1)

    patch.setattr(catalog_records, "bridged", small)


def _forgetful(patch: pytest.MonkeyPatch) -> None:
    def last_only(segments: Sequence[LogSegment], _bound: SeqNum) -> Iterator[LogSegment]:
        yield segments[-1]

    patch.setattr(segmented_log, "from_bound", last_only)


def _endless(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LogSegment, "has", lambda _self, _local: True)


def _early(patch: pytest.MonkeyPatch) -> None:
    """Shorten the old segment: the tail was read before all nodes had followed."""
    plant = bridged

    def early(
        last: LogSegment, *, local_end: SeqNum, time: float, to: LogSegment
    ) -> tuple[LogSegment, LogSegment]:
        return plant(last, local_end=local_end - 1, time=time, to=to)

    patch.setattr(catalog_records, "bridged", early)


def _unconditional(patch: pytest.MonkeyPatch) -> None:
    async def check_closed(*_: object) -> None:
        return None

    patch.setattr(segmented_log.SegmentedLog, "_check_closed", check_closed)


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a node acknowledges what a switch overtook": _acknowledging,
    "a node appends to the old kind after its announcement": _appending,
    "an offset is too small": _small,
    "a read forgets the closed segments": _forgetful,
    "a closed segment has no end": _endless,
    "a segment ends before its last record": _early,
    "a condition does not look into closed segments": _unconditional,
}


@pytest.mark.parametrize("bug", first_of(BUGS, 2))
@pytest.mark.timeout(600)
async def test_a_planted_bug_is_caught(
    bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance, seed = random.Random(1), 0

    def pause_s() -> float:
        """Return a longer pause with later seeds, for machines that are as slow as the first."""
        return chance.choice(PAUSES_S) * (1 + seed // 5)

    slowed(monkeypatch, pause_s)
    BUGS[bug](monkeypatch)
    async with platform_with(tmp_path) as platform:
        for seed in range(CAUGHT_WITHIN):
            try:
                history = await Switching(seed, platform, patience_s=2.0).run()
            except (AssertionError, TimeoutError):
                return
            if check(history):
                return
    pytest.fail(f"no seed below {CAUGHT_WITHIN} shows that {bug}")
