"""Switches between all kinds of log under crashes and lost messages, by seeds; planted bugs.

`--seeds N` runs more seeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise, permutations

import msgspec
import pytest

from indilog.base.errors import IndilogError
from indilog.base.ids import SeqNum
from indilog.base.log_kinds import LOG_KINDS, STRIPES_MAX, LogKind
from indilog.runtime.cell_store import CellStore
from indilog_cells.log import CellLogs
from indilog_compute.log_kinds import catalog_records, freeing
from indilog_compute.log_kinds.catalog_records import NewSegment
from indilog_compute.log_kinds.kinds import LogKinds
from indilog_compute.log_kinds.route import Route
from indilog_compute.log_kinds.segmented_log import SegmentedLog
from indilog_compute.log_kinds.segments import LogSegment, bridged
from tests.cells.switch_callers import simulated
from tests.cells.switch_world import SwitchWorld
from tests.cells.switching import check
from tests.support.repeated import first_of

SEEDS = 8
FOUND = (11,)
"""Seeds that showed a fault: a subscription waited in a segment that had ended."""
CAUGHT_WITHIN = 100


@pytest.mark.heavy
@pytest.mark.timeout(7200)
def test_histories_are_those_of_a_log(seeds_wanted: int | None) -> None:
    seen: Counter[str] = Counter()
    pairs: set[tuple[str, str]] = set()
    seeds = seeds_wanted or SEEDS
    for seed in (*range(seeds), *FOUND):
        callers = simulated(seed)
        history = callers.history
        assert not check(history), f"seed {seed}: {check(history)[:5]}"
        assert history.kinds == [kind for kind, _ in callers.switches]
        pairs.update(pairwise([callers.created, *history.kinds]))
        seen["crashes"] += callers.crashes
        seen["unknown"] += sum(append.is_unknown for append in history.appends)
        seen["conditions"] += sum(a.known is not None for a in history.appends if a.ended)
        seen["reads"] += len(history.reads)
        seen["times"] += len(history.times)
    for what in ("crashes", "unknown", "conditions", "reads", "times"):
        assert seen[what] >= seeds, f"too little happened: {seen}"
    if seeds >= SEEDS:
        expected = {*permutations(LOG_KINDS, 2), *((kind, kind) for kind in STRIPES_MAX)}
        assert pairs == expected, "each kind follows each other; those with stripes also themselves"


def test_a_seed_replays_a_run() -> None:
    first, second = simulated(2), simulated(2)
    assert first.history == second.history
    assert first.world.loop.time() == second.world.loop.time()


def _endless(patch: pytest.MonkeyPatch) -> None:
    """Let the old owner, or another process that left the view, append after the switch."""

    async def end(self: CellLogs) -> SeqNum:
        await self.driver.catch_up()
        return self.driver.state.tail

    patch.setattr(CellLogs, "end", end)


def _stale(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Route, "ended_at", lambda _: None)


def _small(patch: pytest.MonkeyPatch) -> None:
    def small(
        last: LogSegment, *, local_end: SeqNum, time: float, to: LogSegment
    ) -> tuple[LogSegment, LogSegment]:
        closed, new = bridged(last, local_end=local_end, time=time, to=to)
        return closed, msgspec.structs.replace(new, start=new.start - 1)

    patch.setattr(catalog_records, "bridged", small)


def _hasty(patch: pytest.MonkeyPatch) -> None:
    async def wait_for_nodes(*_: object) -> None:
        return None

    patch.setattr(LogKinds, "_wait_for_nodes", wait_for_nodes)


def _acknowledging(patch: pytest.MonkeyPatch) -> None:
    async def settled(
        self: SegmentedLog, number: SeqNum, placed: list[SeqNum], _deadline: float | None = None
    ) -> list[SeqNum]:
        segment = self._route.segment(number)
        assert segment is not None
        return [segment.seqnum(each) for each in placed]

    patch.setattr(SegmentedLog, "settled", settled)


def _shared_folder(patch: pytest.MonkeyPatch) -> None:
    new_segment = LogKinds._new_segment

    async def same(self: LogKinds, name: str, kind: LogKind, stripes: int | None) -> NewSegment:
        found = await new_segment(self, name, kind, stripes)
        return msgspec.structs.replace(found, folder=name if found.folder else "")

    patch.setattr(LogKinds, "_new_segment", same)


def _unwritten(patch: pytest.MonkeyPatch) -> None:
    """Let a storage node keep the empty spaces of freed segments."""

    def drop(self: CellStore, folder: str) -> None:
        spaces = "SELECT id FROM spaces WHERE name LIKE ?"
        for table in ("cells", "floors"):
            deletion = f"DELETE FROM {table} WHERE space IN ({spaces})"
            self._file.execute(deletion, (f"{folder}@%",))

    patch.setattr(CellStore, "_drop", drop)
    patch.setattr(SwitchWorld, "kept_of", lambda *_: [])


def _untrimmed(patch: pytest.MonkeyPatch) -> None:
    async def is_trimmed(_: Route, segment: LogSegment) -> bool:
        return segment.local_end is not None

    patch.setattr(freeing, "_is_trimmed", is_trimmed)


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a segment in cells has no end for a process that left the view": _endless,
    "a segment begins one seqnum too low": _small,
    "a node that left the view reads a segment that ended": _stale,
    "a switch does not wait for the other nodes": _hasty,
    "a node acknowledges what a switch overtook": _acknowledging,
    "all segments of a log have one layout": _shared_folder,
    "a storage node takes deleted cells for unwritten ones": _unwritten,
    "a segment is freed before its records are trimmed": _untrimmed,
}


@pytest.mark.parametrize("bug", first_of(BUGS, 2))
@pytest.mark.timeout(600)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    for seed in range(CAUGHT_WITHIN):
        try:
            callers = simulated(seed)
        except (AssertionError, TimeoutError, IndilogError, KeyError):
            return
        if check(callers.history):
            return
    pytest.fail(f"no seed below {CAUGHT_WITHIN} shows that {bug}")
