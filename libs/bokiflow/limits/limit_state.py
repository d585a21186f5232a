"""Derives which runs of a limit have their turn, from the records of the limit alone.

The records that start, take, park and end the limited runs have the tag of the limit. So a start
requests a turn, and an end or a parking frees a place, without a further record. The order of the
log decides which run is next, so every process derives the same turns. `turns` keeps replicas of
`LimitState`.

**Order.** Of the runs with one key, runs with a larger priority come first, then runs that started
earlier. Keys are served round robin: when a run has begun, its key goes to the end of the queue of
keys.

**Time** is `Record.ordered_at`. If a run waits only for the end of its interval, it gets its turn
with the next record of the limit. So a process appends a reminder when the turn is due.
"""

from __future__ import annotations

import enum
import heapq
import sys
from collections import Counter, OrderedDict, deque
from typing import Final, NamedTuple

import msgspec

from bokiflow.runs.errors import FlowVersionError
from bokiflow.runs.records import (
    VERSION,
    LimitRecord,
    LimitReminded,
    LimitSettings,
    RetryAsked,
    RunContinued,
    RunFinished,
    RunForgotten,
    RunParked,
    RunStarted,
    RunTaken,
    limit_record,
    limit_tag,
    run_in,
)
from indilog import Record
from indilog.replayed import State, SubStream
from indilog.sdk import RecordFormat, SeqNum

WAITING_MAX: Final = 100_000
"""Largest number of runs that wait for their turn in one limit."""
_FORMAT: Final = RecordFormat(b"\xb0T", VERSION, of="BokiFlow", error=FlowVersionError)


class Turn(enum.IntEnum):
    """The state of an open run of a limit."""

    WAITS = 0
    HAS_TURN = 1
    PARKED = 2
    """The run is parked and has no turn. It requests a turn when it is retried."""
    SKIPPED = 3
    """The run had to begin at once, and no place was free. Its owner ends it."""
    REFUSED = 4
    """Too many runs were waiting when this run started. Its owner ends it."""
    DEADLOCKED = 5
    """When the run started, each place that it needs was held by a run that waits for this run, or
    for another waiting run. Its owner ends it.
    """


_ENDED_AT_START: Final = frozenset({Turn.SKIPPED, Turn.REFUSED, Turn.DEADLOCKED})


class LimitedRun(msgspec.Struct, array_like=True, gc=False):
    """An open run of a limit.

    Attributes:
        started_at: seqnum of its start.
        key: its key.
        priority: its priority.
        epoch: its current epoch.
        turn: its state.
        has_begun: whether the run has had its turn before.
        awaited_by: ids of the runs that cannot end before this run has ended.
    """

    started_at: SeqNum
    key: str
    priority: int
    epoch: int
    turn: int = Turn.WAITS
    has_begun: bool = False
    awaited_by: tuple[str, ...] = ()

    def order(self, id_: str) -> tuple[int, SeqNum, str]:
        """Return the place among the waiting runs of its key; the smallest is first."""
        return (-self.priority, self.started_at, id_)


class _Key:
    """The runs with one key.

    Attributes:
        runs: number of open runs with the key.
        having: number of open runs that have their turn.
        waiting: a heap of the runs that wait. Entries of runs that no longer wait are skipped.
        begun: times at which the last runs got their turn; at most as many as may begin in an
            interval.
        due: when the interval lets the next run with this key begin. If no run has the key: when
            the key can be forgotten. None: neither depends on the time.
    """

    __slots__ = ("begun", "due", "having", "runs", "waiting")

    def __init__(self) -> None:
        self.runs = 0
        self.having = 0
        self.waiting: list[tuple[int, SeqNum, str]] = []
        self.begun: deque[float] = deque()
        self.due: float | None = None


class Waiting(NamedTuple):
    """Why a run waits for its turn.

    Attributes:
        before: number of runs with the same key that are before the run.
        having: ids of the runs that hold the places for which the run waits.
        places: number of these places; None: the run waits for its interval.
        due: when the interval lets the next run with its key begin; None: the interval delays no
            run.
        is_total: whether the places are for all keys together.
    """

    before: int
    having: tuple[str, ...] = ()
    places: int | None = None
    due: float | None = None
    is_total: bool = False


class _LimitSnapshot(msgspec.Struct, array_like=True):
    settings: LimitSettings
    clock: float
    runs: dict[str, LimitedRun]
    ready: list[str]
    begun: dict[str, list[float]]


class LimitState(State[None]):
    """The open runs of a limit, after the records read so far.

    Attributes:
        settings: the settings of the limit, as the newest record says.
        clock: `ordered_at` of the last record, seconds since 1970.
        runs: the open runs, by id, in the order of their starts.
        having: the ids of the runs that have their turn.
        waiting: number of runs that wait for their turn.
        ended_at_start: the ids of the runs that are skipped, refused or deadlocked.
        granted: the ids of runs that got their turn, until a reader removes them from here. Not a
            part of the state.
    """

    def __init__(self) -> None:
        self.settings = LimitSettings()
        self.clock = 0.0
        self.runs: dict[str, LimitedRun] = {}
        self.having: dict[str, None] = {}
        self.waiting = 0
        self.ended_at_start: dict[str, None] = {}
        self.granted: dict[str, None] = {}
        self._keys: dict[str, _Key] = {}
        self._ready: OrderedDict[str, None] = OrderedDict()
        """Keys with a run that may begin as soon as `total` permits. The next key is first."""
        self._due: list[tuple[float, str]] = []
        """When runs of keys may begin by their interval, as a heap."""
        self._idle: list[tuple[float, str]] = []
        """When keys without runs are forgotten, as a heap."""
        self._awaiting: Counter[tuple[str | None, str]] = Counter()
        """The key of an entry is the key of waiting runs (None: any key) and the id of another run.
        The value is the number of these waiting runs that must end before the other run can end.
        """

    # --- applying records

    def apply(self, record: Record) -> None:
        """Apply a record.

        Raises:
            FlowVersionError: another version wrote the record.
        """
        said = limit_record(record.data)
        self.clock = max(self.clock, record.ordered_at)
        for line in (self._due, self._idle):
            while line and line[0][0] <= self.clock:
                due, key = heapq.heappop(line)
                if (known := self._keys.get(key)) is not None and known.due == due:
                    known.due = None
                    self._update(key)
        self._grant()
        if said is not None:
            self._effect(record, said)
            self._grant()

    def _effect(self, record: Record, said: LimitRecord) -> None:
        if isinstance(said, LimitReminded):
            self._set(said.settings)
            return
        if isinstance(said, RunForgotten):
            run = self.runs.get(said.run)
            if run is not None and run.started_at == said.started_at:
                self._end(said.run, run)
            return
        id_ = run_in(record.tags)
        if id_ is None:
            return
        if isinstance(said, RunStarted):
            self._start(id_, record.seqnum, said)
        elif (run := self.runs.get(id_)) is not None:
            self._effect_on(id_, run, said)

    def _effect_on(self, id_: str, run: LimitedRun, said: object) -> None:
        match said:
            case RunTaken(epoch=epoch) if epoch == run.epoch + 1:
                run.epoch = epoch
            case RunContinued(epoch=epoch) if epoch == run.epoch:
                run.epoch = epoch + 1
            case RunParked(epoch=epoch) if epoch == run.epoch and run.turn == Turn.HAS_TURN:
                self._leave(id_, run, Turn.PARKED)
            case RetryAsked() if run.turn == Turn.PARKED:
                self._leave(id_, run, Turn.WAITS)
            case RunFinished(epoch=epoch) if epoch == run.epoch:
                self._end(id_, run)
            case _:
                pass  # the record is of another epoch, or does not concern the limit

    def _start(self, id_: str, seqnum: SeqNum, started: RunStarted) -> None:
        limit = started.limit
        if limit is None or id_ in self.runs:
            return
        self._set(limit.settings)
        run = LimitedRun(seqnum, sys.intern(limit.key), limit.priority, int(bool(started.executor)))
        run.awaited_by = () if started.parent is None else started.parent.awaited_by
        is_full = self.is_full
        self.runs[id_] = run
        self._keys.setdefault(run.key, _Key()).runs += 1
        self._enter(id_, run)
        if not (is_full or limit.skips or run.awaited_by):
            return
        self._grant()
        if run.turn != Turn.WAITS:
            return
        if limit.skips:
            self._leave(id_, run, Turn.SKIPPED)
        elif is_full:
            self._leave(id_, run, Turn.REFUSED)
        elif self._is_deadlocked(run):
            self._leave(id_, run, Turn.DEADLOCKED)

    def _is_deadlocked(self, run: LimitedRun) -> bool:
        """Whether a run waits for places, and no such place can become free before the run begins.

        That is certain if each run with such a place can end only after a run that is itself
        waiting for such a place. Deadlocks through several limits, or several keys, are not found.
        """
        if not any(id_ in self.having for id_ in run.awaited_by):
            return False
        concurrency, key = self.settings.concurrency, run.key
        if concurrency is not None and self._keys[key].having >= concurrency:
            having = (id_ for id_ in self.having if self.runs[id_].key == key)
            if all((key, id_) in self._awaiting for id_ in having):
                return True
        return not self._has_place() and all((None, id_) in self._awaiting for id_ in self.having)

    def _set(self, settings: LimitSettings | None) -> None:
        if settings is None or settings == self.settings:
            return
        self.settings = settings
        for key in list(self._keys):
            self._update(key)

    # --- turns

    def _enter(self, id_: str, run: LimitedRun) -> None:
        """Count a run in its new turn."""
        key = self._keys[run.key]
        if run.turn == Turn.WAITS:
            self.waiting += 1
            self._count_awaiting(run, 1)
            heapq.heappush(key.waiting, run.order(id_))
        elif run.turn == Turn.HAS_TURN:
            key.having += 1
            self.having[id_] = None
        elif run.turn in _ENDED_AT_START:
            self.ended_at_start[id_] = None
        self._update(run.key)

    def _leave(self, id_: str, run: LimitedRun, turn: Turn | None) -> None:
        """Remove a run from the counts of its turn. If `turn` is given, enter that turn."""
        if run.turn == Turn.WAITS:
            self.waiting -= 1
            self._count_awaiting(run, -1)
        elif run.turn == Turn.HAS_TURN:
            self._keys[run.key].having -= 1
            del self.having[id_]
            self.granted.pop(id_, None)
        self.ended_at_start.pop(id_, None)
        run.turn = -1 if turn is None else turn
        if turn is not None:
            self._enter(id_, run)

    def _count_awaiting(self, run: LimitedRun, by: int) -> None:
        for id_ in run.awaited_by:
            for place in ((run.key, id_), (None, id_)):
                self._awaiting[place] += by
                if not self._awaiting[place]:
                    del self._awaiting[place]

    def _end(self, id_: str, run: LimitedRun) -> None:
        self._leave(id_, run, None)
        del self.runs[id_]
        self._keys[run.key].runs -= 1
        self._update(run.key)

    def _grant(self) -> None:
        """Give turns to runs while a run may begin."""
        while self._ready and self._has_place():
            key, _ = self._ready.popitem(last=False)
            known = self._keys[key]
            id_ = heapq.heappop(known.waiting)[-1]  # `_update` has removed all other entries
            run = self.runs[id_]
            assert run.turn == Turn.WAITS, "a run that waits gets its turn"
            if self.settings.starts is not None:
                known.begun.append(self.clock)
            run.has_begun = True
            self.granted[id_] = None
            self._leave(id_, run, Turn.HAS_TURN)

    def _has_place(self) -> bool:
        total = self.settings.total
        return total is None or len(self.having) < total

    def _update(self, key: str) -> None:
        """Note whether a run with this key may begin now, or when its interval lets it begin."""
        known, settings = self._keys[key], self.settings
        while known.waiting and not self._waits(known.waiting[0]):
            heapq.heappop(known.waiting)
        starts = settings.starts
        while known.begun and (starts is None or len(known.begun) > starts):
            known.begun.popleft()
        if not known.runs:
            self._ready.pop(key, None)
            self._forget(key, known)
            return
        is_free = settings.concurrency is None or known.having < settings.concurrency
        may_begin = bool(known.waiting) and is_free
        due = self._due_of(known) if may_begin else None
        if may_begin and due is None:
            self._ready.setdefault(key)
        else:
            self._ready.pop(key, None)
        if due is not None and due != known.due:
            heapq.heappush(self._due, (due, key))
        known.due = due

    def _forget(self, key: str, known: _Key) -> None:
        """Forget a key without runs. If a new run with this key would have to wait for the
        interval, forget the key later.
        """
        known.due = known.begun[-1] + self.settings.interval_s if known.begun else self.clock
        if known.due <= self.clock:
            del self._keys[key]
        else:
            heapq.heappush(self._idle, (known.due, key))

    def _due_of(self, known: _Key) -> float | None:
        """Return when the next run of a key may begin by its interval; None: now."""
        starts = self.settings.starts
        if starts is None or len(known.begun) < starts:
            return None
        due = known.begun[0] + self.settings.interval_s
        return due if due > self.clock else None

    def _waits(self, place: tuple[int, SeqNum, str]) -> bool:
        run = self.runs.get(place[-1])
        return run is not None and run.turn == Turn.WAITS and run.started_at == place[1]

    # --- questions

    @property
    def is_full(self) -> bool:
        """Whether a further run would be refused, because `WAITING_MAX` runs wait."""
        return self.waiting >= WAITING_MAX

    def next_due(self) -> tuple[float, str] | None:
        """Return the time at which the next run gets its turn by time alone, and its id. None: no
        run waits only for time.
        """
        while self._due and self._has_place():
            due, key = self._due[0]
            known = self._keys.get(key)
            if known is not None and known.due == due and known.waiting:
                return due, known.waiting[0][-1]
            heapq.heappop(self._due)  # superseded
        return None

    def why_waits(self, id_: str, *, counts: bool = True) -> Waiting | None:
        """Return why a run waits for its turn; None: it does not wait.

        Without `counts`, `before` is 0. Then the call does not take time for each waiting run, but
        only for each run with a turn.
        """
        run = self.runs.get(id_)
        if run is None or run.turn != Turn.WAITS:
            return None
        known, settings, order = self._keys[run.key], self.settings, run.order(id_)
        before = 0
        if counts:
            before = sum(1 for place in known.waiting if place < order and self._waits(place))
        if settings.concurrency is not None and known.having >= settings.concurrency:
            having = tuple(one for one in self.having if self.runs[one].key == run.key)
            return Waiting(before, having, settings.concurrency)
        if settings.total is not None and not self._has_place():
            return Waiting(before, tuple(self.having), settings.total, is_total=True)
        return Waiting(before, due=self._due_of(known))

    # --- checkpoints

    @property
    def size(self) -> int:
        """See `State.size`."""
        return len(self.runs) + sum(len(known.begun) for known in self._keys.values())

    def snapshot(self) -> object:
        """See `State.snapshot`."""
        runs = {id_: msgspec.structs.astuple(run) for id_, run in self.runs.items()}
        begun = {key: list(known.begun) for key, known in self._keys.items()}
        return (self.settings, self.clock, runs, list(self._ready), begun)

    @classmethod
    def restore(cls, content: bytes) -> LimitState:
        """Return the state of an encoded snapshot."""
        kept, state = msgspec.msgpack.decode(content, type=_LimitSnapshot), cls()
        state.settings, state.clock, state.runs = kept.settings, kept.clock, kept.runs
        for key, begun in kept.begun.items():  # in the order of the snapshot, which decides turns
            known = state._keys[sys.intern(key)] = _Key()
            known.begun.extend(begun)
        for run in kept.runs.values():
            run.key = sys.intern(run.key)  # many runs share a key
            state._keys[run.key].runs += 1
        for id_, run in kept.runs.items():
            state._enter(id_, run)
        for key in kept.begun:
            state._update(key)
        state._ready = OrderedDict.fromkeys(kept.ready)
        state.granted = dict(state.having)
        return state

    def check_invariants(self) -> None:
        """Assert that the counts agree, and that no run waits without a reason."""
        turns = [run.turn for run in self.runs.values()]
        assert self.waiting == turns.count(Turn.WAITS)
        assert len(self.having) == turns.count(Turn.HAS_TURN)
        assert not (self._ready and self._has_place()), "a turn is given at once"
        waiting = [run for run in self.runs.values() if run.turn == Turn.WAITS]
        assert self._awaiting == Counter(
            (key, id_) for run in waiting for id_ in run.awaited_by for key in (run.key, None)
        )
        for key, known in self._keys.items():
            waits = any(run.key == key and run.turn == Turn.WAITS for run in self.runs.values())
            assert waits == bool(known.waiting)
            assert known.runs or known.due is not None, "an idle key is forgotten in time"


def limit_stream(limit: str) -> SubStream:
    """Return the sub-stream of a limit."""
    tag = limit_tag(limit)
    return SubStream(tag, f"{tag}:state", _FORMAT, f"Limit {limit!r} of the flow")
