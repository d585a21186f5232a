"""Decides the next actions of one compute node: which invocations it begins and claims, which
executors it declares dead, and when it writes a checkpoint.

`InvocationExecutor.actions` gets the time and returns actions; it reads the invocation table, and
performs no input or output. `InvocationService` performs the actions.

**Claims.** The node that accepted or freed an invocation may claim the invocation when it is due.
Other nodes may claim it one lease later.

**Dead executors.** An executor with running invocations appends three heartbeats per lease. If an
executor has appended no record for a lease, another node appends a record that declares this
executor dead. All nodes then treat the executor as dead, and its invocations are due again after a
pause. An executor may also be silent because the log takes no appends. So the other node first
appends a heartbeat of its own. After this heartbeat was recorded, it waits for a third of a lease
before it declares the silent executor dead. A restarted node declares the executors of its earlier
incarnations dead at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias

from indilog.base.ids import SeqNum
from indilog.config import NodeConfig
from indilog_compute.invocations.checkpoint import RecordedInvocation
from indilog_compute.invocations.invocation_table import InvocationTable, node_of
from indilog_compute.invocations.records import (
    EXECUTORS_TAG,
    CallsReleased,
    DeclaredDead,
    Event,
    ExecutorHeartbeat,
    Failure,
    InvocationEnded,
    InvocationsClaimed,
    application_of,
)
from indilog_compute.invocations.scheduling import Schedules

_BEATS_PER_LEASE: Final = 3
CLAIMS_MAX: Final = 100
"""Largest number of invocations in one claim."""
RELEASES_MAX: Final = 500
"""Largest number of invocations that one record releases."""
_RELEASED_AFTER_S: Final = 1.0
"""Seconds for which ids to release are gathered before one record releases them."""
_STREAMS_MAX: Final = 16
"""Largest number of streams (tags) of the invocations in one claim."""
_CHECKPOINT_RECORDS_MIN: Final = 1000


class Now(NamedTuple):
    """The time by each of three clocks, in seconds.

    Attributes:
        monotonic: this process's monotonic clock, for the leases of executors.
        log: the log's time (`Record.ordered_at`), seconds since 1970, for due invocations.
        wall: the machine's wall clock, seconds since 1970, only for the calendar of schedules.
    """

    monotonic: float
    log: float
    wall: float


class Append(NamedTuple):
    """Append the event with these tags."""

    event: Event
    tags: tuple[str, ...]


class Begin(NamedTuple):
    """Run the invocation; this executor owns it."""

    invocation: RecordedInvocation


class Abandon(NamedTuple):
    """Stop running the invocation; this executor no longer owns it."""

    id: str


class WriteCheckpoint(NamedTuple):
    """Write a checkpoint of the invocation table, and trim the records that it replaces."""


Action: TypeAlias = Append | Begin | Abandon | WriteCheckpoint


class _LastRecord(NamedTuple):
    """The last record of an executor; times are by this process's monotonic clock, in seconds.

    Attributes:
        last: seqnum of the record.
        at: when this process first knew of the record.
        proven_at: when this node had appended a record while the executor was silent, which proves
            that the log takes appends; None: there is no such record.
    """

    last: SeqNum
    at: float
    proven_at: float | None = None


class InvocationExecutor:
    """Decides what one compute node does next.

    Args:
        name: `node#incarnation`; no other executor ever has this name.
        config: settings with the limits. The executor runs at most `invocations_running_max`
            invocations of an application at a time.

    Attributes:
        begun: ids of the invocations that run here. `InvocationService` updates the ids when it
            performs `Begin` and `Abandon`.
    """

    def __init__(
        self, name: str, table: InvocationTable, schedules: Schedules, config: NodeConfig
    ) -> None:
        self.name = name
        self.begun: set[str] = set()
        self._table = table
        self._schedules = schedules
        self._lease_s = config.invocations.invocation_lease_s
        self._tries_max = config.invocations.invocation_tries_max
        self._running_max = (
            config.invocations.invocations_running_max if config.functions.workers else 0
        )
        self._lasts: dict[str, _LastRecord] = {}
        self._releasing: dict[str, None] = {}
        self._release_at = 0.0

    @property
    def node(self) -> str:
        """The compute node's name."""
        return node_of(self.name)

    def use_table(self, table: InvocationTable) -> None:
        """Use another invocation table from now on."""
        self._table = table

    def rename(self, name: str) -> list[Abandon]:
        """Continue under another name, because a record declares this executor dead; return the
        actions that stop its invocations.
        """
        stopped = [Abandon(id_) for id_ in sorted(self.begun)]
        self.name = name
        self.begun.clear()
        return stopped

    def release(self, ids: Iterable[str], now: float) -> bool:
        """Note held invocations, which a later call of `actions` releases. Return whether `actions`
        or `rest_s` must be called now.

        Args:
            ids: ids of held invocations.
            now: monotonic time, in seconds.
        """
        was_empty = not self._releasing
        if was_empty:
            self._release_at = now + _RELEASED_AFTER_S
        self._releasing.update(dict.fromkeys(ids))
        return bool(was_empty and self._releasing) or len(self._releasing) >= RELEASES_MAX

    def actions(self, now: Now) -> list[Action]:
        """Return the actions to perform now. The caller calls `actions` again after it has read the
        records of these actions.
        """
        return [
            *self._begin_and_abandon(),
            *self._declare_dead(now.monotonic),
            *self._claim(now.log),
            *self._heartbeat(now.monotonic),
            *self._release_held(now.monotonic),
            *self._run_scheduled(now.wall),
            *self._write_checkpoint(),
        ]

    def rest_s(self, now: Now) -> float | None:
        """Return the seconds after which `actions` must be called again if no record is read
        before; None: no call is needed.
        """
        looks = [
            self._next_look(record) for name, record in self._lasts.items() if name != self.name
        ]
        if (own := self._lasts.get(self.name)) is not None:
            looks.append(own.at + self._lease_s / _BEATS_PER_LEASE)
        if self._releasing:
            looks.append(self._release_at)
        rests = [look - now.monotonic for look in looks]
        next_ = self._table.next_free(self.node, self._lease_s, self._is_full)
        if self._running_max and next_ is not None:
            rests.append(next_ - now.log)
        if (
            self._running_max
            and (due := self._schedules.next_due(self._table, now.wall)) is not None
        ):
            rests.append(due - now.wall)
        return max(0.0, min(rests)) if rests else None

    def note_recorded(self, now: float) -> None:
        """Note that this node appended records, and read them at `now` (monotonic clock). The
        records prove that the log takes appends, so a silent executor could have appended a
        heartbeat.
        """
        for name, record in self._lasts.items():
            if record.proven_at is None and now >= self._next_look(record):
                self._lasts[name] = record._replace(proven_at=now)

    # --- internal

    def _next_look(self, record: _LastRecord) -> float:
        """Return when to prove by a heartbeat of this node that the log takes appends, or, after
        this proof, when to declare the executor of `record` dead.
        """
        beat_s = self._lease_s / _BEATS_PER_LEASE
        if record.proven_at is None:
            return record.at + self._lease_s - beat_s
        return max(record.at + self._lease_s, record.proven_at + beat_s)

    def _begin_and_abandon(self) -> list[Action]:
        running = self._table.executors.get(self.name)
        own = running.ids if running is not None else set()
        actions: list[Action] = [Abandon(id_) for id_ in sorted(self.begun - own)]
        actions += [Begin(self._table.open[id_]) for id_ in sorted(own - self.begun)]
        return actions

    def _declare_dead(self, now: float) -> Iterable[Action]:
        executors = self._table.executors
        self._lasts = {e: record for e, record in self._lasts.items() if e in executors}
        for executor, running in executors.items():
            record = self._lasts.get(executor)
            if record is None or record.last != running.last:
                record = self._lasts[executor] = _LastRecord(running.last, now)
            if executor == self.name:
                continue
            is_due = now >= self._next_look(record)
            if node_of(executor) == self.node or (is_due and record.proven_at is not None):
                yield Append(DeclaredDead(executor, running.last, self.name), (EXECUTORS_TAG,))
            elif is_due:
                yield Append(ExecutorHeartbeat(self.name), (EXECUTORS_TAG,))

    def _is_full(self, application: str) -> bool:
        """Whether this executor runs as many invocations of an application as it may."""
        return self._table.running_by_application(self.name)[application] >= self._running_max

    def _claim(self, now: float) -> Iterable[Action]:
        ids: list[str] = []
        streams: set[str] = set()
        running = self._table.running_by_application(self.name).copy()
        failed = 0

        def is_full(application: str) -> bool:
            return running[application] >= self._running_max

        for free in self._table.claimable(now, self.node, self._lease_s, is_full):
            if len(ids) + failed == CLAIMS_MAX:
                break
            if free.tries >= self._tries_max:
                failed += 1
                yield Append(_tried_too_often(self.name, free), (free.stream,))
            elif len(streams | {free.stream}) <= _STREAMS_MAX:
                ids.append(free.id)
                streams.add(free.stream)
                running[application_of(free.function)] += 1
        if ids:
            yield Append(InvocationsClaimed(self.name, tuple(ids)), tuple(sorted(streams)))

    def _heartbeat(self, now: float) -> Iterable[Action]:
        own = self._lasts.get(self.name)
        if own is not None and now >= own.at + self._lease_s / _BEATS_PER_LEASE:
            yield Append(ExecutorHeartbeat(self.name), (EXECUTORS_TAG,))

    def _release_held(self, now: float) -> Iterable[Action]:
        """Release the gathered invocations. If the record of a release is lost, the invocation is
        still held, and the next call releases it again.
        """
        self._releasing = {
            id_: None
            for id_ in self._releasing
            if (found := self._table.get(id_)) is not None and found.holder
        }
        ids = list(self._releasing)
        if len(ids) >= RELEASES_MAX or (ids and now >= self._release_at):
            for start in range(0, len(ids), RELEASES_MAX):
                some = tuple(ids[start : start + RELEASES_MAX])
                yield Append(CallsReleased(some), (EXECUTORS_TAG,))

    def _run_scheduled(self, now: float) -> Iterable[Action]:
        if self._running_max:
            for accepted in self._schedules.due(self._table, self.name, now):
                yield Append(accepted, (accepted.stream,))

    def _write_checkpoint(self) -> Iterable[Action]:
        """Yield a `WriteCheckpoint` if there are enough new records.

        The number of new records that a node needs grows with its rank. So another node writes a
        checkpoint only if node 0 does not.
        """
        new = self._table.count - self._table.checkpointed
        enough = max(_CHECKPOINT_RECORDS_MIN, 2 * self._table.size)
        if new >= enough * (1 + self._schedules.rank()):
            yield WriteCheckpoint()


def _tried_too_often(executor: str, invocation: RecordedInvocation) -> InvocationEnded:
    message = (
        f"{invocation.function} was begun {invocation.tries} times, and each time its worker or "
        "compute node failed; it is not retried again. The function may have had effects."
    )
    return InvocationEnded(
        executor, invocation.id, 0, None, Failure("WorkerCrashedError", message, {})
    )
