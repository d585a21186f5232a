"""Invocations under any order of records, compared with a model that shares no code with the table.
A table restored from a checkpoint equals one that read the whole history.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from indilog_compute.invocations.checkpoint import checkpoint_parts, newest_checkpoint
from indilog_compute.invocations.invocation_table import InvocationTable, TableLimits
from indilog_compute.invocations.records import (
    STREAMS,
    CallsReleased,
    Checkpointed,
    DeclaredDead,
    Event,
    ExecutorHeartbeat,
    Freed,
    InvocationAccepted,
    InvocationEnded,
    InvocationsClaimed,
)

LIMITS = TableLimits(50.0, 4, 4, 10_000, 1.0, 4.0)
EXECUTORS = st.sampled_from(["a#1", "a#2", "b#1"])
IDS = st.sampled_from([f"i{n}" for n in range(6)])


@st.composite
def accepted(draw: st.DrawFn) -> InvocationAccepted:
    is_scheduled = draw(st.booleans())
    return InvocationAccepted(
        id=draw(IDS),
        executor=draw(EXECUTORS),
        function="app.f",
        arguments=draw(st.sampled_from([b"{}", b'{"n":1}'])),
        position=0,
        stream=draw(st.sampled_from(STREAMS[:2])),
        delay_s=draw(st.sampled_from([0.0, 0.0, 50.0])),
        key=draw(st.sampled_from(["", "", "k1", "k2"])),
        schedule="s" if is_scheduled else "",
        at=draw(st.sampled_from([60.0, 120.0, 180.0])) if is_scheduled else 0.0,
        after=draw(st.sampled_from([0.0, 60.0, 120.0])) if is_scheduled else 0.0,
        holder=draw(st.sampled_from(["", "", "r1", "r2"])),
    )


EVENTS = st.one_of(
    accepted(),
    st.builds(InvocationsClaimed, EXECUTORS, st.lists(IDS, max_size=3).map(tuple)),
    st.builds(Freed, EXECUTORS, IDS, is_lost=st.booleans()),
    st.builds(InvocationEnded, EXECUTORS, IDS, st.just(0), st.sampled_from([b"1", b"2"])),
    st.builds(CallsReleased, st.lists(IDS, max_size=3).map(tuple)),
    st.builds(ExecutorHeartbeat, EXECUTORS),
    st.builds(DeclaredDead, EXECUTORS, st.integers(0, 40), EXECUTORS),
)
HISTORIES = st.lists(st.tuples(EVENTS, st.floats(0, 20)), max_size=40)


class Model:
    """Owners and outcomes of runs, computed from the whole history each time."""

    def __init__(self, history: list[Event]) -> None:
        self.runs: dict[str, str | None] = {}
        self.outcomes: dict[str, bytes | None] = {}
        self.keys: dict[str, str] = {}
        self._history = history
        self._dead: set[str] = set()
        self._last = 0.0
        for place, event in enumerate(history):
            getattr(self, "_" + type(event).__name__.lower())(place, event)

    def _invocationaccepted(self, place: int, event: InvocationAccepted) -> None:
        if event.schedule:
            if event.after != self._last:
                return
            self._last = event.at
        if event.id in self.runs or event.id in self.outcomes or event.key in self.keys:
            return
        if event.key:
            self.keys[event.key] = event.id
        now = event.delay_s == 0 and event.executor not in self._dead
        self.runs[event.id] = event.executor if now else None

    def _invocationsclaimed(self, place: int, event: InvocationsClaimed) -> None:
        for id_ in event.ids:
            if event.executor not in self._dead and self.runs.get(id_, "") is None:
                self.runs[id_] = event.executor

    def _freed(self, place: int, event: Freed) -> None:
        if self.runs.get(event.id) == event.executor:
            self.runs[event.id] = None

    def _invocationended(self, place: int, event: InvocationEnded) -> None:
        if event.id in self.runs:
            del self.runs[event.id]
            self.outcomes[event.id] = event.result

    def _callsreleased(self, place: int, event: CallsReleased) -> None:
        pass  # it changes how long an outcome is kept, which is for ever here

    def _executorheartbeat(self, place: int, event: ExecutorHeartbeat) -> None:
        pass

    def _declareddead(self, place: int, event: DeclaredDead) -> None:
        if event.executor not in self.runs.values():
            return
        said = [n for n, e in enumerate(self._history[:place]) if _by(e) == event.executor]
        if all(n <= event.seen for n in said):
            self._dead.add(event.executor)
            for id_ in [i for i, owner in self.runs.items() if owner == event.executor]:
                self.runs[id_] = None


def _by(event: Any) -> str | None:  # noqa: ANN401
    """Return the executor that wrote the record; None: no executor did."""
    return None if isinstance(event, DeclaredDead | CallsReleased) else event.executor


@given(st.lists(EVENTS, max_size=40))
def test_the_fold_agrees_with_a_model_over_the_whole_history(history: list[Event]) -> None:
    table = InvocationTable(TableLimits(1e9, 1000, 1000, 10**9, 1.0, 4.0))
    for place, event in enumerate(history):
        table.apply(place, 1000.0 + 100.0 * place, event)  # all pauses and delays have elapsed
        table.check_invariants()
    model = Model(history)
    assert {id_: i.executor for id_, i in table.open.items()} == model.runs
    for id_, result in model.outcomes.items():
        found = table.get(id_)
        assert found is not None
        assert found.ended is not None
        ended = history[found.ended]
        assert isinstance(ended, InvocationEnded)
        assert ended.result == result
    for key, id_ in model.keys.items():
        kept = table.with_key("app.f", key)
        assert kept is not None
        assert kept.id == id_


@given(HISTORIES, st.data())
def test_a_reader_restored_from_a_checkpoint_reaches_the_same_state(
    history: list[tuple[Event, float]], data: st.DataObject
) -> None:
    """The streams may be trimmed as far as the checkpoint allows."""
    cut = data.draw(st.integers(0, len(history)))
    full, time, late = InvocationTable(LIMITS), 1000.0, None
    for place, (event, after_s) in enumerate(history):
        if place == cut:
            found = newest_checkpoint(enumerate(checkpoint_parts(full.checkpoint(), "c"), place))
            assert found is not None
            late = InvocationTable.restored(LIMITS, found)
            for _, until in full.trimmable(found.checkpoint.end):
                assert until <= found.checkpoint.end
        time += after_s
        full.apply(place, time, event)
        if late is not None:
            late.apply(place, time, event)
            late.check_invariants()
    if late is not None:
        assert msgspec.to_builtins(late.checkpoint()) == msgspec.to_builtins(full.checkpoint())


@given(HISTORIES)
def test_the_number_of_kept_results_is_bounded(history: list[tuple[Event, float]]) -> None:
    table, time = InvocationTable(LIMITS), 1000.0
    for place, (event, after_s) in enumerate(history):
        time += after_s
        table.apply(place, time, event)
        assert table.kept <= 2 * (LIMITS.results_kept_max + 1)
        needed = [i.seqnum for i in table.open.values()]
        for stream, until in table.trimmable(table.end):
            own = [i.seqnum for i in table.open.values() if i.stream == stream]
            assert all(seqnum >= until for seqnum in own), needed


@given(st.data())
def test_a_new_reader_starts_from_the_checkpoint_that_a_full_reader_selects(
    data: st.DataObject,
) -> None:
    """Concurrent checkpoint writers are in any state, and parts arrive in any order. The writers of
    the selected checkpoint may trim late.
    """
    table, records, trims, floor = (
        InvocationTable(LIMITS),
        list[tuple[int, Checkpointed]](),
        list[int](),
        0,
    )
    writing: list[tuple[list[Checkpointed], list[int]]] = []
    known = [0]
    for seqnum in range(100, 100 + data.draw(st.integers(1, 40))):
        if not writing or data.draw(st.booleans()):
            follows = known[-1] if data.draw(st.booleans()) else data.draw(st.sampled_from(known))
            state = table.checkpoint()
            part_bytes = len(msgspec.msgpack.encode(state)) // data.draw(st.integers(1, 3)) + 1
            writing.append((checkpoint_parts(state, f"c{seqnum}", follows, part_bytes), []))
        left, places = data.draw(st.sampled_from(writing))
        part = left.pop(0)
        places.append(seqnum)
        table.apply(seqnum, 0.0, part)
        records.append((seqnum, part))
        if not left:
            writing = [one for one in writing if one[0]]
            if table.checkpoint_place == seqnum + 1:
                known.append(seqnum + 1)
                trims.append(places[0])
        is_trimmed = data.draw(st.booleans())
        if trims and is_trimmed:
            floor = max(floor, trims.pop(data.draw(st.integers(0, len(trims) - 1))))
        found = newest_checkpoint((at, one) for at, one in records if at >= floor)
        assert (found.place if found is not None else 0) == table.checkpoint_place
