"""What one compute node does next about invocations: which calls it begins, what it claims, which
executors it gives up, when it writes a checkpoint. `Now` in, actions out.

The node that accepted an invocation, or freed it, may claim it first; other nodes one lease later.
An executor that runs something appends three heartbeats per lease. One without a record for a lease
is given up, and what it ran is due again. An executor may be silent because the log takes no
records. So a node that is about to give up another executor appends a heartbeat of its own first,
and when that is recorded it waits for a third of a lease. A node that has restarted gives up its
own earlier executors at once, because they are dead.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple, TypeAlias

from indilog.base.ids import SeqNum
from indilog.config import NodeConfig
from indilog_compute.invocations.checkpoint import Invocation
from indilog_compute.invocations.fold import Fold, node_of
from indilog_compute.invocations.records import (
    EXECUTORS_TAG,
    Claimed,
    Ended,
    Event,
    Failure,
    GivenUp,
    Heartbeat,
    application_of,
)
from indilog_compute.invocations.scheduling import Schedules

_BEATS_PER_LEASE: Final = 3
CLAIMS_MAX: Final = 100
"""Invocations in one claim."""
_STREAMS_MAX: Final = 16
"""Streams of the invocations in one claim."""
_CHECKPOINT_RECORDS_MIN: Final = 1000


class Now(NamedTuple):
    """What time it is, by the clock that each decision goes by; each in seconds.

    Attributes:
        steady: of this process, which nothing sets: for leases that it watches.
        log: of the log (`Record.ordered_at`), since 1970: for what is due there.
        wall: of the machine, since 1970: for the calendar of schedules only.
    """

    steady: float
    log: float
    wall: float


class Append(NamedTuple):
    """Append this event, with these tags."""

    event: Event
    tags: tuple[str, ...]


class Begin(NamedTuple):
    """Run this invocation: it is ours."""

    invocation: Invocation


class Abandon(NamedTuple):
    """Stop running this invocation: it is not ours any more."""

    id: str


class WriteCheckpoint(NamedTuple):
    """Record the state of the fold, and trim the records that it makes needless."""


Action: TypeAlias = Append | Begin | Abandon | WriteCheckpoint


class _Heard(NamedTuple):
    """The last record of an executor, and when it was seen by the steady clock.

    `proven_at`: when the log, the executor having been silent for a while, took a record of ours.
    """

    last: SeqNum
    at: float
    proven_at: float | None = None


class Executor:
    """Decides for one compute node.

    Args:
        name: `node#incarnation`, which no other executor ever has.
        config: the limits; of one application it claims `invocations_running_max` at most,
            together with what it runs.

    Attributes:
        begun: ids of what it runs; kept by the shell that carries out `Begin` and `Abandon`.
    """

    def __init__(self, name: str, fold: Fold, schedules: Schedules, config: NodeConfig) -> None:
        self.name = name
        self.begun: set[str] = set()
        self._fold = fold
        self._schedules = schedules
        self._lease_s = config.invocations.invocation_lease_s
        self._tries_max = config.invocations.invocation_tries_max
        self._running_max = (
            config.invocations.invocations_running_max if config.functions.workers else 0
        )
        self._heard: dict[str, _Heard] = {}

    @property
    def node(self) -> str:
        """The compute node's name."""
        return node_of(self.name)

    def follow(self, fold: Fold) -> None:
        """Go by this fold from now on."""
        self._fold = fold

    def rename(self, name: str) -> list[Abandon]:
        """The log says that this executor is dead: go on as another one."""
        stopped = [Abandon(id_) for id_ in sorted(self.begun)]
        self.name = name
        self.begun.clear()
        return stopped

    def actions(self, now: Now) -> list[Action]:
        """Return what to do; to be asked again when that is done and seen in the log."""
        return [
            *self._begin_and_abandon(),
            *self._give_up(now.steady),
            *self._claim(now.log),
            *self._heartbeat(now.steady),
            *self._run_scheduled(now.wall),
            *self._write_checkpoint(),
        ]

    def rest_s(self, now: Now) -> float | None:
        """Return in how many seconds to ask for actions again, if nothing is recorded before."""
        looks = [self._next_look(heard) for name, heard in self._heard.items() if name != self.name]
        if (own := self._heard.get(self.name)) is not None:
            looks.append(own.at + self._lease_s / _BEATS_PER_LEASE)
        rests = [look - now.steady for look in looks]
        next_ = self._fold.next_free(self.node, self._lease_s, self._is_full)
        if self._running_max and next_ is not None:
            rests.append(next_ - now.log)
        if (
            self._running_max
            and (due := self._schedules.next_due(self._fold, now.wall)) is not None
        ):
            rests.append(due - now.wall)
        return max(0.0, min(rests)) if rests else None

    def note_recorded(self, now: float) -> None:
        """Note that own appends were recorded and read at `now` by the steady clock: the log takes
        records, so a silent executor could have appended a heartbeat.
        """
        for name, heard in self._heard.items():
            if heard.proven_at is None and now >= self._next_look(heard):
                self._heard[name] = heard._replace(proven_at=now)

    # --- inside

    def _next_look(self, heard: _Heard) -> float:
        """Return when to make sure that the log takes records, or to give an executor up."""
        beat_s = self._lease_s / _BEATS_PER_LEASE
        if heard.proven_at is None:
            return heard.at + self._lease_s - beat_s
        return max(heard.at + self._lease_s, heard.proven_at + beat_s)

    def _begin_and_abandon(self) -> list[Action]:
        running = self._fold.executors.get(self.name)
        own = running.ids if running is not None else set()
        actions: list[Action] = [Abandon(id_) for id_ in sorted(self.begun - own)]
        actions += [Begin(self._fold.open[id_]) for id_ in sorted(own - self.begun)]
        return actions

    def _give_up(self, now: float) -> Iterable[Action]:
        executors = self._fold.executors
        self._heard = {e: heard for e, heard in self._heard.items() if e in executors}
        for executor, running in executors.items():
            heard = self._heard.get(executor)
            if heard is None or heard.last != running.last:
                heard = self._heard[executor] = _Heard(running.last, now)
            if executor == self.name:
                continue
            is_due = now >= self._next_look(heard)
            if node_of(executor) == self.node or (is_due and heard.proven_at is not None):
                yield Append(GivenUp(executor, running.last, self.name), (EXECUTORS_TAG,))
            elif is_due:
                yield Append(Heartbeat(self.name), (EXECUTORS_TAG,))

    def _is_full(self, application: str) -> bool:
        """Tell whether it claims no more of an application."""
        return self._fold.running_by_application(self.name)[application] >= self._running_max

    def _claim(self, now: float) -> Iterable[Action]:
        ids: list[str] = []
        streams: set[str] = set()
        running = self._fold.running_by_application(self.name).copy()
        given_up = 0

        def is_full(application: str) -> bool:
            return running[application] >= self._running_max

        for free in self._fold.claimable(now, self.node, self._lease_s, is_full):
            if len(ids) + given_up == CLAIMS_MAX:
                break
            if free.tries >= self._tries_max:
                given_up += 1
                yield Append(_gave_up(self.name, free), (free.stream,))
            elif len(streams | {free.stream}) <= _STREAMS_MAX:
                ids.append(free.id)
                streams.add(free.stream)
                running[application_of(free.function)] += 1
        if ids:
            yield Append(Claimed(self.name, tuple(ids)), tuple(sorted(streams)))

    def _heartbeat(self, now: float) -> Iterable[Action]:
        own = self._heard.get(self.name)
        if own is not None and now >= own.at + self._lease_s / _BEATS_PER_LEASE:
            yield Append(Heartbeat(self.name), (EXECUTORS_TAG,))

    def _run_scheduled(self, now: float) -> Iterable[Action]:
        if self._running_max:
            for accepted in self._schedules.due(self._fold, self.name, now):
                yield Append(accepted, (accepted.stream,))

    def _write_checkpoint(self) -> Iterable[Action]:
        """Let the first node do it when enough is new, and further ones when it did not."""
        new = self._fold.count - self._fold.checkpointed
        enough = max(_CHECKPOINT_RECORDS_MIN, 2 * self._fold.size)
        if new >= enough * (1 + self._schedules.rank):
            yield WriteCheckpoint()


def _gave_up(executor: str, invocation: Invocation) -> Ended:
    message = (
        f"{invocation.function} was begun {invocation.tries} times, and each time its worker or "
        "compute node was lost; the platform gave up, and it may have had effects."
    )
    return Ended(executor, invocation.id, 0, None, Failure("WorkerCrashedError", message, {}))
