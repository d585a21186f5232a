"""The table of all recorded invocations, derived only from the records of `$invocations`. Every
compute node derives the same table.

The order of the log decides conflicts: of several records with the same key, of several claims of
an invocation, and of several outcomes, the first record takes effect. Time is the log's time
(`Record.ordered_at`), never the clock of a writer or reader. `InvocationService` applies the
records; `InvocationExecutor` and `Schedules` read the table.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias, assert_never

from sortedcontainers import SortedList

from indilog.base.ids import SeqNum
from indilog_compute.invocations.checkpoint import (
    LastDue,
    NewestCheckpoint,
    RecordedInvocation,
    TableCheckpoint,
)
from indilog_compute.invocations.held_invocations import HeldInvocations
from indilog_compute.invocations.records import (
    EXECUTORS_TAG,
    CallsReleased,
    Checkpointed,
    DeclaredDead,
    Event,
    ExecutorHeartbeat,
    Freed,
    InvocationAccepted,
    InvocationEnded,
    InvocationsClaimed,
    application_of,
    digest_of,
)
from indilog_compute.invocations.states import (
    InvocationChange,
    InvocationState,
    next_state,
    state_of,
)

_DEAD_EXECUTORS_KEPT: Final = 1000
_RECENT: Final = 100_000
"""How many seqnums of applied records are kept, for the comparison with a checkpoint."""


class TableLimits(NamedTuple):
    """Limits on kept ended invocations, and the pauses before lost invocations are due again; the
    same on every compute node.
    """

    results_kept_s: float
    results_kept_max: int
    keys_kept_max: int
    results_kept_bytes_max: int
    retry_s_min: float
    retry_s_max: float
    app_kept_share_max: float = 1.0
    """Largest share of one application in the kept ended invocations (0 to 1)."""


_Place: TypeAlias = tuple[float, SeqNum, str]
"""Due time, seqnum and id of an invocation."""


@dataclass(slots=True)
class Running:
    """An executor with running invocations; `last` is the seqnum of its last record."""

    last: SeqNum
    ids: set[str] = field(default_factory=set)
    by_application: Counter[str] = field(default_factory=Counter)
    """How many of `ids` belong to each application."""

    def add(self, invocation: RecordedInvocation) -> None:
        """Add an invocation that the executor now runs."""
        self.ids.add(invocation.id)
        self.by_application[application_of(invocation.function)] += 1

    def remove(self, invocation: RecordedInvocation) -> None:
        """Remove an invocation that the executor no longer runs."""
        self.ids.remove(invocation.id)
        self.by_application[application_of(invocation.function)] -= 1
        assert self.by_application[application_of(invocation.function)] >= 0, (
            "only added invocations are removed"
        )


class _Kept:
    """Kept ended invocations that are not held; the one that has been kept longest comes first."""

    def __init__(self) -> None:
        self.invocations: OrderedDict[str, RecordedInvocation] = OrderedDict()
        self.size = 0

    @property
    def oldest(self) -> RecordedInvocation:
        """The invocation that has been kept longest."""
        return next(iter(self.invocations.values()))

    def add(self, invocation: RecordedInvocation) -> None:
        self.invocations[invocation.id] = invocation
        self.size += invocation.size

    def remove(self, invocation: RecordedInvocation) -> None:
        del self.invocations[invocation.id]
        self.size -= invocation.size
        assert self.size >= 0, "only counted invocations are removed"


class InvocationTable:
    """Applies the records in the order of the log.

    Attributes:
        end: the seqnum below which all records are applied.
        count: number of records that were applied since the log began.
        checkpointed: number of records that the newest valid checkpoint covers.
        checkpoint_place: the seqnum after the last part of the newest valid checkpoint; 0: there is
            no checkpoint.
        clock: log's time of the last record, seconds since 1970.
        open: invocations that have not ended, by id.
        open_by_application: number of open invocations of each application.
        held: the held invocations, open or ended.
        executors: executors with running invocations, by name.
        last_due: the last accepted due time of each schedule.
    """

    def __init__(self, limits: TableLimits) -> None:
        self.end: SeqNum = 0
        self.count = 0
        self.checkpointed = 0
        self.checkpoint_place: SeqNum = 0
        self.clock = 0.0
        self.open: dict[str, RecordedInvocation] = {}
        self.executors: dict[str, Running] = {}
        self.last_due: dict[str, LastDue] = {}
        self.open_by_application: Counter[str] = Counter()
        self.held = HeldInvocations()
        self._limits = limits
        self._ended: dict[str, RecordedInvocation] = {}
        self._keys: dict[tuple[str, str], RecordedInvocation] = {}
        self._kept = {False: _Kept(), True: _Kept()}
        """The kept invocations with an idempotency key (True), and those without a key (False). So
        an invocation without a key never evicts an invocation with a key.
        """
        self._kept_of: dict[tuple[bool, str], _Kept] = {}
        """The kept invocations of `_kept`, also by application. An application that exceeds its
        share evicts its own invocations.
        """
        self._free: dict[str, SortedList[_Place]] = {}
        """By application: open invocations without an executor, earliest due time first."""
        self._declared_dead: OrderedDict[str, None] = OrderedDict()
        self._needed: dict[str, SortedList[SeqNum]] = {}
        self._grown: set[str] = set()
        self._recent: deque[SeqNum] = deque()
        self._recent_from: SeqNum = 0

    # --- applying records

    def apply(self, seqnum: SeqNum, ordered_at: float, event: Event | None) -> None:
        """Apply the record at `seqnum`."""
        assert seqnum >= self.end, "records are applied in order"
        self.end = seqnum + 1
        self.count += 1
        if len(self._recent) == _RECENT:
            self._recent_from = self._recent.popleft() + 1
        self._recent.append(seqnum)
        self.clock = max(self.clock, ordered_at)
        self._expire()
        match event:
            case None:
                pass
            case InvocationAccepted():
                self._accept(seqnum, event)
            case InvocationsClaimed(executor, ids):
                self._claim(seqnum, executor, ids)
            case Freed():
                self._free_again(seqnum, event)
            case InvocationEnded():
                self._end(seqnum, event)
            case CallsReleased() | ExecutorHeartbeat() | DeclaredDead():
                self._apply_of_executors(seqnum, event)
            case Checkpointed():
                self._cover(seqnum, event)
            case unreachable:
                assert_never(unreachable)

    def _apply_of_executors(
        self, seqnum: SeqNum, event: CallsReleased | ExecutorHeartbeat | DeclaredDead
    ) -> None:
        """Apply a record with the tag `EXECUTORS_TAG`, instead of the stream of an invocation."""
        self._grown.add(EXECUTORS_TAG)
        match event:
            case CallsReleased(ids):
                self._release_held(ids)
            case ExecutorHeartbeat(executor):
                self._note_record(executor, seqnum)
            case DeclaredDead(executor, seen, by):
                self._declare_dead(executor, seen, node_of(by))

    def _accept(self, seqnum: SeqNum, event: InvocationAccepted) -> None:
        stream = event.stream
        self._grown.add(stream)
        self._note_record(event.executor, seqnum)
        if event.schedule:
            last = self.last_due.get(event.schedule)
            if event.after != (last.at if last is not None else 0.0):
                return  # an earlier record has accepted this due time
            self.last_due[event.schedule] = LastDue(event.at, self.clock)
        is_free = bool(event.delay_s) or event.executor in self._declared_dead
        change = InvocationChange.DELAYED if is_free else InvocationChange.ACCEPTED
        target = next_state(self.get(event.id), change)
        if target is None or (event.function, event.key) in self._keys:
            return
        made = RecordedInvocation(
            event.id,
            seqnum,
            event.function,
            self.clock + event.delay_s,
            node_of(event.executor),
            stream,
            event.key,
            digest_of(event.arguments) if event.key else b"",
            len(event.arguments),
            holder=event.holder,
        )
        self._open(made)
        self._remember(made)
        if is_free:
            self._enqueue(made)
        else:
            self._run(made, event.executor, seqnum)
        assert state_of(made) is target

    def _claim(self, seqnum: SeqNum, executor: str, ids: tuple[str, ...]) -> None:
        if executor in self._declared_dead:
            return
        for claimed in (self.open[i] for i in ids if i in self.open):
            target = next_state(claimed, InvocationChange.CLAIMED)
            if target is not None and claimed.due <= self.clock:
                self._dequeue(claimed)
                self._run(claimed, executor, seqnum)
                assert state_of(claimed) is target
        self._note_record(executor, seqnum)

    def _end(self, seqnum: SeqNum, event: InvocationEnded) -> None:
        self._note_record(event.executor, seqnum)
        invocation = self.get(event.id)
        change = InvocationChange.FAILED if event.result is None else InvocationChange.RETURNED
        target = next_state(invocation, change)
        if invocation is None or target is None:
            return  # an earlier record is the outcome
        del self.open[invocation.id]
        self.open_by_application[application_of(invocation.function)] -= 1
        assert self.open_by_application[application_of(invocation.function)] >= 0, (
            "each open invocation is counted"
        )
        self._stop(invocation)
        invocation.ended, invocation.ended_at, invocation.failed = (
            seqnum,
            self.clock,
            event.result is None,
        )
        assert state_of(invocation) is target
        invocation.size += len(event.result or b"")
        if invocation.holder:
            self.held.grow(invocation, len(event.result or b""))
        self._keep(invocation)

    def _release_held(self, ids: Iterable[str]) -> None:
        for released in filter(None, map(self.get, ids)):
            if not released.holder:
                continue
            self.held.remove(released)
            released.holder, released.released_at = "", self.clock
            if released.ended is not None:
                self._ended.pop(released.id)  # `_keep` adds it again: its retention begins now
                self._keep(released)

    def _free_again(self, seqnum: SeqNum, event: Freed) -> None:
        self._note_record(event.executor, seqnum)
        freed = self.open.get(event.id)
        if freed is not None and freed.executor == event.executor:
            node = node_of(event.executor)
            self._release(freed, node, InvocationChange.FREED, is_lost=event.is_lost)

    def _cover(self, seqnum: SeqNum, event: Checkpointed) -> None:
        if event.part == event.parts - 1 and event.follows >= self.checkpoint_place:
            self.checkpointed = event.count
            self.checkpoint_place = seqnum + 1

    def _declare_dead(self, executor: str, seen: SeqNum, node: str) -> None:
        running = self.executors.get(executor)
        if running is None or running.last > seen:
            return
        self._declared_dead[executor] = None
        while len(self._declared_dead) > _DEAD_EXECUTORS_KEPT:
            self._declared_dead.popitem(last=False)
        for id_ in sorted(running.ids):
            self._release(
                self.open[id_], node, InvocationChange.EXECUTOR_DECLARED_DEAD, is_lost=True
            )

    # --- transitions of an invocation

    def _open(self, invocation: RecordedInvocation) -> None:
        assert invocation.id not in self.open, "an invocation is accepted once"
        self.open[invocation.id] = invocation
        self.open_by_application[application_of(invocation.function)] += 1

    def _run(self, invocation: RecordedInvocation, executor: str, seqnum: SeqNum) -> None:
        assert invocation.executor is None, "one executor at a time"
        assert invocation.ended is None, "an ended invocation never runs again"
        invocation.executor = executor
        invocation.tries += 1
        self.executors.setdefault(executor, Running(seqnum)).add(invocation)

    def _stop(self, invocation: RecordedInvocation) -> None:
        """Remove an invocation from its executor, or from the queue if no executor runs it."""
        if invocation.executor is None:
            self._dequeue(invocation)
            return
        running = self.executors[invocation.executor]
        running.remove(invocation)
        if not running.ids:
            del self.executors[invocation.executor]
        invocation.executor = None

    def _release(
        self, invocation: RecordedInvocation, node: str, change: InvocationChange, *, is_lost: bool
    ) -> None:
        """Remove an invocation from its executor. The executors of `node` may claim it first.

        If the invocation had begun (`is_lost`), it is due again after a pause that doubles with
        each try. Otherwise it is due at once, and the try does not count.
        """
        target = next_state(invocation, change)
        assert target is InvocationState.SCHEDULED, "an invocation with an executor is running"
        self._stop(invocation)
        invocation.node = node
        pause_s = 0.0
        if is_lost:
            limits = self._limits
            pause_s = min(limits.retry_s_min * 2.0 ** (invocation.tries - 1), limits.retry_s_max)
        else:
            invocation.tries -= 1
        assert invocation.tries >= 0, "each release follows a start"
        invocation.due = self.clock + pause_s
        self._enqueue(invocation)

    def _enqueue(self, invocation: RecordedInvocation) -> None:
        """Put an invocation without an executor into the queue from which due ones are claimed."""
        assert invocation.executor is None, "only an invocation without executor waits for one"
        queue = self._free.setdefault(application_of(invocation.function), SortedList())
        queue.add(_place(invocation))

    def _dequeue(self, invocation: RecordedInvocation) -> None:
        application = application_of(invocation.function)
        queue = self._free[application]
        queue.remove(_place(invocation))
        if not queue:
            del self._free[application]

    def _note_record(self, executor: str, seqnum: SeqNum) -> None:
        if (running := self.executors.get(executor)) is not None:
            assert seqnum >= running.last, "records are applied in order"
            running.last = seqnum

    def _keep(self, invocation: RecordedInvocation) -> None:
        """Keep an ended invocation. If it is not held and its application then exceeds its share,
        drop the oldest kept invocations of the application that are not held.
        """
        assert invocation.ended is not None, "only ended invocations are kept here"
        assert invocation.executor is None, "no executor runs an ended invocation"
        limits = self._limits
        self._ended[invocation.id] = invocation
        if invocation.holder:
            return
        self._kept[bool(invocation.key)].add(invocation)
        place = (bool(invocation.key), application_of(invocation.function))
        own = self._kept_of.setdefault(place, _Kept())
        own.add(invocation)
        most = limits.keys_kept_max if invocation.key else limits.results_kept_max
        share = limits.app_kept_share_max
        while len(own.invocations) > max(1, most * share) or (
            own.size > limits.results_kept_bytes_max * share and len(own.invocations) > 1
        ):
            self._forget(own.oldest)

    def _expire(self) -> None:
        limits = self._limits
        for has_key, kept in self._kept.items():
            most = limits.keys_kept_max if has_key else limits.results_kept_max
            while kept.invocations and (
                len(kept.invocations) > most
                or kept.size > limits.results_kept_bytes_max
                or _kept_since(kept.oldest) + limits.results_kept_s <= self.clock
            ):
                self._forget(kept.oldest)

    def _forget(self, invocation: RecordedInvocation) -> None:
        assert invocation.ended is not None, "open invocations are never dropped"
        assert not invocation.holder, "held invocations are never dropped"
        self._kept[bool(invocation.key)].remove(invocation)
        place = (bool(invocation.key), application_of(invocation.function))
        own = self._kept_of[place]
        own.remove(invocation)
        if not own.invocations:
            del self._kept_of[place]
        del self._ended[invocation.id]
        self._needed[invocation.stream].remove(invocation.seqnum)
        if invocation.key:
            del self._keys[invocation.function, invocation.key]

    # --- questions

    @property
    def kept(self) -> int:
        """Number of ended invocations that are kept."""
        return len(self._ended)

    def get(self, id: str) -> RecordedInvocation | None:  # noqa: A002 - the field's name
        """Return an invocation; None: it never existed, or is no longer kept."""
        return self.open.get(id) or self._ended.get(id)

    def all(self) -> list[RecordedInvocation]:
        """Return all open and kept invocations, in no particular order."""
        return [*self.open.values(), *self._ended.values()]

    def with_key(self, function: str, key: str) -> RecordedInvocation | None:
        """Return the invocation of a function with this key; None: there is none, open or kept."""
        return self._keys.get((function, key))

    def is_declared_dead(self, executor: str) -> bool:
        """Whether a record has declared `executor` dead."""
        return executor in self._declared_dead

    def running_by_application(self, executor: str) -> Counter[str]:
        """Return, by application, the number of invocations that an executor runs. The caller must
        not change the result.
        """
        running = self.executors.get(executor)
        return running.by_application if running is not None else Counter()

    def claimable(
        self, now: float, node: str, later_s: float, is_full: Callable[[str], bool]
    ) -> Iterator[RecordedInvocation]:
        """Yield the invocations that `node` may claim at `now` (the log's time), earliest due time
        first.

        When an invocation is due, the node that it names (`RecordedInvocation.node`) may claim it.
        Every other node may claim it `later_s` seconds later. Before each invocation, `is_full` is
        called with its application; if the result is true, no further invocation of this
        application is yielded.
        """
        queues = [self._due(application, now, is_full) for application in self._free]
        for _, _, id_ in heapq.merge(*queues):
            free = self.open[id_]
            if free.node == node or free.due + later_s <= now:
                yield free

    def _due(
        self, application: str, now: float, is_full: Callable[[str], bool]
    ) -> Iterator[_Place]:
        if is_full(application):  # checked first, because the queue may be long
            return
        for place in self._free[application].irange(maximum=(now, self.end, "")):
            if is_full(application):
                return
            yield place

    def next_free(
        self, node: str, later_s: float, is_full: Callable[[str], bool] = lambda _: False
    ) -> float | None:
        """Return the earliest time (the log's time) at which `node` may claim an invocation; None:
        no invocation waits. Invocations of applications for which `is_full` is true do not count.
        """
        times = [
            self._next_of(queue, node, later_s)
            for application, queue in self._free.items()
            if not is_full(application)
        ]
        return min(times, default=None)

    def _next_of(self, queue: SortedList[_Place], node: str, later_s: float) -> float:
        latest = queue[0][0] + later_s
        for due, _, id_ in queue:
            if due > latest:
                break
            if self.open[id_].node == node:
                return due
        return latest

    @property
    def size(self) -> int:
        """Number of invocations in the table, open or ended."""
        return len(self.open) + len(self._ended)

    def trimmable(self, end: SeqNum) -> list[tuple[str, SeqNum]]:
        """Return the streams to trim after a checkpoint of the records below `end`, each with the
        first seqnum to keep.

        Only streams with new records since the last call are returned.
        """
        streams, self._grown = sorted(self._grown), set()
        return [(stream, min(self._needed_from(stream), end)) for stream in streams]

    def not_trimmed(self, streams: Iterable[str]) -> None:
        """Let the next call of `trimmable` return these streams again; their trims failed."""
        self._grown.update(streams)

    def _needed_from(self, stream: str) -> SeqNum:
        needed = self._needed.get(stream)
        return needed[0] if needed else self.end

    def agrees(self, checkpoint: Checkpointed) -> bool:
        """Whether this table has applied exactly the records that a checkpoint covers. Records
        after the end of the checkpoint do not matter.

        The answer is also True if the checkpoint is invalid, or so old that this table can no
        longer compare it.
        """
        if checkpoint.follows > self.checkpoint_place:
            return False  # this node missed a record
        if checkpoint.follows < self.checkpoint_place or checkpoint.end < self._recent_from:
            return True
        later = len(self._recent) - bisect_left(self._recent, checkpoint.end)
        return self.count - later == checkpoint.count

    # --- checkpoints

    def checkpoint(self) -> TableCheckpoint:
        """Return the whole state as a checkpoint."""
        return TableCheckpoint(
            end=self.end,
            count=self.count,
            clock=self.clock,
            open=tuple(self.open.values()),
            kept=tuple(self._ended.values()),
            executors={name: running.last for name, running in self.executors.items()},
            dead_executors=tuple(self._declared_dead),
            last_due=dict(self.last_due),
        )

    @classmethod
    def restored(cls, limits: TableLimits, found: NewestCheckpoint) -> InvocationTable:
        """Return a table with the state of a checkpoint."""
        checkpoint, place = found
        table = cls(limits)
        table.end, table.count, table.clock = checkpoint.end, checkpoint.count, checkpoint.clock
        table.checkpointed, table._recent_from = checkpoint.count, checkpoint.end
        table.checkpoint_place = place
        table._restore(checkpoint)
        return table

    def _restore(self, checkpoint: TableCheckpoint) -> None:
        self.last_due = dict(checkpoint.last_due)
        self._declared_dead.update(dict.fromkeys(checkpoint.dead_executors))
        for name, last in checkpoint.executors.items():
            self.executors[name] = Running(last)
        for invocation in checkpoint.open:
            self._open(invocation)
            self._remember(invocation)
            if invocation.executor is None:
                self._enqueue(invocation)
            else:
                self.executors[invocation.executor].add(invocation)
        for invocation in checkpoint.kept:
            self._remember(invocation)
            self._keep(invocation)

    def _remember(self, invocation: RecordedInvocation) -> None:
        self._grown.add(invocation.stream)
        self._needed.setdefault(invocation.stream, SortedList()).add(invocation.seqnum)
        if invocation.key:
            self._keys[invocation.function, invocation.key] = invocation
        if invocation.holder:
            self.held.add(invocation)

    def check_invariants(self) -> None:
        """Assert that each open invocation is either queued or run by exactly one executor, and
        that all counts are right.
        """
        free = {id_ for queue in self._free.values() for _, _, id_ in queue}
        running = [id_ for r in self.executors.values() for id_ in r.ids]
        for executor in self.executors.values():
            assert +executor.by_application == Counter(
                application_of(self.open[id_].function) for id_ in executor.ids
            )
        assert len(running) == len(set(running)), "one executor at a time"
        assert free.isdisjoint(running)
        assert free | set(running) == set(self.open)
        assert not set(self.open) & set(self._ended)
        assert sum(map(len, self._needed.values())) == len(self.open) + len(self._ended)
        for kept in self._kept.values():
            assert kept.size == sum(invocation.size for invocation in kept.invocations.values())
        self.held.check_invariants()
        held = sum(bool(invocation.holder) for invocation in self._ended.values())
        assert sum(len(own.invocations) for own in self._kept_of.values()) + held == self.kept
        assert +self.open_by_application == Counter(
            application_of(i.function) for i in self.open.values()
        )
        assert self.checkpointed <= self.count, "a checkpoint covers applied records only"
        assert len(self._declared_dead) <= _DEAD_EXECUTORS_KEPT
        assert len(self._recent) <= _RECENT
        assert all(self.open[id_].executor is None for id_ in free)
        assert all(
            self.open[id_].executor == name for name, r in self.executors.items() for id_ in r.ids
        )
        assert all(i.key == key for (_, key), i in self._keys.items())


def node_of(executor: str) -> str:
    """Return the compute node of an executor, from its name."""
    return executor.partition("#")[0]


def _kept_since(invocation: RecordedInvocation) -> float:
    """Return the log's time at which the retention of an ended invocation begins."""
    return max(invocation.ended_at, invocation.released_at)


def _place(invocation: RecordedInvocation) -> _Place:
    return invocation.due, invocation.seqnum, invocation.id
