"""A cluster of real roles in one thread: messages arrive in a seeded random order, some late, some
repeated, some lost.

It does no I/O and uses no clock but the given one. The disk is a dictionary, and time advances when
no message can be delivered. It is for tests of the roles together; the simulator covers faults of
disks and networks.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import assert_never

from indilog.base.ids import (
    EMPTY_TAG,
    MAX_SEQNUM,
    Epoch,
    Instant,
    MetalogPosition,
    NodeId,
    SeqNum,
    tag_columns,
)
from indilog.base.log import Record
from indilog.config import Config
from indilog.kernel.cold import without_store
from indilog.kernel.index_snapshot import without_snapshots
from indilog.kernel.metalog import encode_entry
from indilog.kernel.view import View
from indilog.roles.role import (
    Answer,
    AnswerAppends,
    AskCells,
    AskCold,
    AskSnapshots,
    ColdAnswered,
    Discard,
    Effect,
    Event,
    FrameKind,
    FrameRead,
    Ignore,
    Location,
    Persist,
    Persisted,
    ReadFrame,
    Received,
    ReclaimableBytes,
    Role,
    Send,
    SnapshotsAnswered,
    Started,
    TermBegun,
)
from indilog.runtime.cluster.assembly import role_of
from indilog.wire.messages import Direction, Message, MetalogEntries
from indilog_compute.engine import Engine
from indilog_compute.reads.operation import PENDING, Answered

LOG = "orders"
ROUNDS_MAX = 200_000
_IDLE_S = 60.0
"""If no timer is due within this many seconds, no resend is pending, only daily work."""
_SLOW = 0.8
"""Probability that a message to a slow node is late."""


class Oracle:
    """The true state, from independent evidence: acknowledgements and published cuts."""

    def __init__(self) -> None:
        self.records: dict[SeqNum, tuple[bytes, tuple[str, ...]]] = {}
        self.tails: dict[MetalogPosition, SeqNum] = {0: 0}
        self.times: dict[MetalogPosition, int] = {}
        self.entry_bytes: dict[MetalogPosition, int] = {}

    def published(self, message: MetalogEntries) -> None:
        for entry in message.entries:
            self.entry_bytes[entry.position] = len(encode_entry(entry))
            assert self.times.setdefault(entry.position, entry.time_us) == entry.time_us
            before = self.tails.get(entry.position)
            if before is not None:
                tail = before + sum(entry.counts.values())
                assert self.tails.setdefault(entry.position + 1, tail) == tail

    def matching(self, tag: str | None, below: SeqNum) -> list[SeqNum]:
        return sorted(
            s for s, (_, tags) in self.records.items() if s < below and (tag is None or tag in tags)
        )

    def next(self, tag: str | None, bound: SeqNum, below: SeqNum) -> SeqNum | None:
        return next((s for s in self.matching(tag, below) if s >= bound), None)

    def prev(self, tag: str | None, bound: SeqNum, below: SeqNum) -> SeqNum | None:
        return next((s for s in reversed(self.matching(tag, below)) if s <= bound), None)


class Waiter:
    """A stub of a caller; compared by identity."""

    def __init__(self, data: bytes = b"", tags: tuple[str, ...] = ()) -> None:
        self.data = data
        self.tags = tags
        self.seqnum: SeqNum | None = None
        self.outcome: object = PENDING


class RoleCluster:
    """All roles of a view, and the messages between them."""

    def __init__(
        self,
        view: View,
        config: Config,
        *,
        seed: int,
        lose: float = 0.0,
        repeat: float = 0.0,
        delay: float = 0.0,
        slow: frozenset[NodeId] = frozenset(),
    ) -> None:
        self.view = view
        self.config = config
        self.random = random.Random(seed)
        self.now = 1000.0
        self.oracle = Oracle()
        self.ignored: list[str] = []
        self.healed = False
        self.stopped: frozenset[NodeId] = frozenset()
        """Paused nodes; messages to them wait."""
        self.sent: list[str] = []
        """The kind of every sent message."""
        self.down: set[NodeId] = set()
        """Nodes that receive no messages."""
        self._lose, self._repeat, self._delay = lose, repeat, delay
        self._slow = slow
        self._epoch: dict[NodeId, int] = {}
        self._frames: dict[NodeId, list[tuple[FrameKind, bytes]]] = {n: [] for n in view.nodes}
        self._events: dict[NodeId, deque[Event]] = {n: deque() for n in view.nodes}
        self._late: list[tuple[NodeId, Event]] = []
        self.roles: dict[NodeId, Role] = {}
        for node in view.nodes:
            self.start(node)
        self.settle()

    def engine(self, index: int = 0) -> Engine:
        engine = self.roles[self.view.engines[index]]
        assert isinstance(engine, Engine)
        return engine

    # --- starts and stops of nodes

    def start(self, node: NodeId) -> None:
        """Start a node, or restart it from its persisted frames; messages in flight to it are
        lost.
        """
        role = role_of(node, [self.view], self.config)
        for place, (kind, payload) in enumerate(self._frames[node]):
            role.recover(kind, payload, Location(1, place, len(payload)))
        self.roles[node] = role
        self._epoch[node] = self._epoch.get(node, 0) + 1
        primary = self.view.sequencers[0]
        term = TermBegun(Epoch(self._epoch.get(primary, 1)), primary)
        self._events[node] = deque([Started(Epoch(self._epoch[node])), term])
        if node == primary:  # its incarnation numbers the term
            for other in self.roles.keys() - {node}:
                self._events[other].append(term)

    # --- what callers do

    def append(self, data: bytes, *tags: str, engine: int = 0) -> Waiter:
        waiter = Waiter(data, tags)
        self.engine(engine).append(data, tag_columns(LOG, tags), waiter)
        return waiter

    def read(
        self,
        direction: Direction,
        tag: int,
        bound: SeqNum,
        *,
        position: MetalogPosition = 0,
        engine: int = 0,
        fresh: bool = False,
    ) -> tuple[Record | None, MetalogPosition]:
        """Read to the end; return the record and the position that the answer reflects."""
        waiter = Waiter()
        role = self.engine(engine)
        answer = role.read(direction, tag, bound, position, waiter, fresh=fresh)
        if answer is not PENDING:
            return answer, role.tag_position  # type: ignore[return-value]
        self.run_until(lambda: waiter.outcome is not PENDING)
        assert isinstance(waiter.outcome, Answered), waiter.outcome
        return waiter.outcome.value, waiter.outcome.position  # type: ignore[return-value]

    def read_page(
        self, tag: int, bound: SeqNum, limit: int, *, position: MetalogPosition = 0, engine: int = 0
    ) -> tuple[list[Record], MetalogPosition]:
        waiter = Waiter()
        self.engine(engine).read_page(tag, bound, position, limit, waiter)
        self.run_until(lambda: waiter.outcome is not PENDING)
        assert isinstance(waiter.outcome, Answered), waiter.outcome
        return waiter.outcome.value, waiter.outcome.position  # type: ignore[return-value]

    def find_time(self, time_us: int, *, engine: int = 0) -> SeqNum:
        waiter = Waiter()
        role = self.engine(engine)
        role.order_lookups.find_time(time_us, role.position, waiter)
        self.run_until(lambda: waiter.outcome is not PENDING)
        assert isinstance(waiter.outcome, Answered), waiter.outcome
        return waiter.outcome.value  # type: ignore[return-value]

    # --- running

    def step(self) -> bool:
        """Run one iteration of a random node with work; return False if no node has any."""
        busy = [
            node for node, events in self._events.items() if events and node not in self.stopped
        ]
        if not busy:
            return self._release_late()
        node = self.random.choice(busy)
        events = self._events[node]
        count = self.random.randint(1, len(events))
        self._turn(node, [events.popleft() for _ in range(count)])
        if self._late and self.random.random() < 0.2:
            self._release_late()
        return True

    def _release_late(self) -> bool:
        if not self._late:
            return False
        node, event = self._late.pop(self.random.randrange(len(self._late)))
        self._events[node].append(event)
        return True

    def poke(self) -> None:
        """Run an iteration of every engine, as a shell does after calls of clients."""
        for node in self.view.engines:
            self._turn(node, [])

    def settle(self) -> None:
        """Run until no message is left, advancing the time for resends of lost messages."""
        for _ in range(ROUNDS_MAX):
            self.poke()
            while self.step():
                pass
            deadlines = [d for role in self.roles.values() if (d := role.deadline()) is not None]
            if not deadlines or self._quiet():
                return
            if min(deadlines) > self.now + _IDLE_S:
                self._read_fresh()
            self._pass_time(min(deadlines))
        raise AssertionError("the cluster does not become idle")

    def _read_fresh(self) -> None:
        """Make every engine ask for the end of the log: an idle engine does not notice a lost
        entry.
        """
        for node in self.view.engines:
            role = self.roles[node]
            assert isinstance(role, Engine)
            role.read(Direction.NEXT, EMPTY_TAG, MAX_SEQNUM, 0, Waiter(), fresh=True)

    def run_until(self, done: object) -> None:
        assert callable(done)
        for _ in range(ROUNDS_MAX):
            if done():
                return
            self.poke()
            if not self.step():
                deadlines = [
                    d for role in self.roles.values() if (d := role.deadline()) is not None
                ]
                assert deadlines or done(), "no timer is set and the condition does not hold"
                if deadlines and not done():
                    self._pass_time(min(deadlines))
        raise AssertionError("the condition does not hold in time")

    def lockstep(self) -> None:
        """Let every node handle all messages sent to it before: one network delay passes."""
        self.now += 0.001
        inboxes = {node: list(events) for node, events in self._events.items()}
        for sent in self._events.values():
            sent.clear()
        for node, events in inboxes.items():
            self._turn(node, events)

    def pass_seconds(self, seconds: float) -> None:
        """Advance the time, with all iterations that nodes run meanwhile; do not wait until
        idle.
        """
        end = self.now + seconds
        while self.now < end:
            self.poke()
            while self.step():
                pass
            self._pass_time(min(end, self.now + 0.05))

    def _quiet(self) -> bool:
        tails = {engine.tail for engine in map(self.engine, range(len(self.view.engines)))}
        return (
            len(tails) == 1
            and tails == {max(self.oracle.tails.values())}
            and all(
                self.engine(i).ready
                and self.engine(i).tag_position == self.engine(i).position
                and not self.engine(i).status()["progress"]["appends_pending"]
                for i in range(len(self.view.engines))
            )
        )

    def _pass_time(self, due: float) -> None:
        self.now = max(self.now + 0.001, due)
        for node, role in list(self.roles.items()):
            deadline = role.deadline()
            if deadline is not None and deadline <= self.now and node not in self.stopped:
                self._turn(node, [])

    def _turn(self, node: NodeId, events: Sequence[Event]) -> None:
        role = self.roles[node]
        for effect in role.handle(events, Instant(self.now)):
            self._perform(node, effect)
        role.check_invariants()

    def _perform(self, node: NodeId, effect: Effect) -> None:  # noqa: C901 a case per effect
        match effect:
            case Send(to, message):
                self.sent.append(type(message).__name__)
                if isinstance(message, MetalogEntries):
                    self.oracle.published(message)
                self._deliver(to, Received(node, message, Epoch(self._epoch[node])), message)
            case Persist(kind, payload, token):
                frames = self._frames[node]
                frames.append((kind, payload))
                location = Location(1, len(frames) - 1, len(payload))
                self._events[node].append(Persisted(token, location))
            case ReadFrame(location, token):
                self._events[node].append(FrameRead(token, self._frames[node][location.offset][1]))
            case AnswerAppends():
                self._on_appended(effect)
            case Answer(waiter, outcome):
                assert isinstance(waiter, Waiter)
                waiter.outcome = outcome
            case AskSnapshots(request):
                self._events[node].append(SnapshotsAnswered(without_snapshots(request)))
            case AskCold(cold_request):
                self._events[node].append(ColdAnswered(without_store(cold_request)))
            case AskCells():
                pass  # no cell is kept here, and the answer is lost
            case Discard() | ReclaimableBytes():
                pass  # a discarded batch stays readable here
            case Ignore(_, reason):
                self.ignored.append(reason)
            case unreachable:
                assert_never(unreachable)

    def _on_appended(self, effect: AnswerAppends) -> None:
        for seqnum, waiter in enumerate(effect.waiters, effect.first):
            if isinstance(waiter, Waiter):
                waiter.seqnum = seqnum
                assert seqnum not in self.oracle.records, "seqnums are unique"
                self.oracle.records[seqnum] = (waiter.data, waiter.tags)

    def _deliver(self, to: NodeId, event: Event, message: Message) -> None:
        assert to in self.roles, f"{message} to {to}"
        chance = self.random.random
        if to in self.down or (not self.healed and chance() < self._lose):
            return
        copies = 2 if chance() < self._repeat else 1
        for _ in range(copies):
            if chance() < (_SLOW if to in self._slow else self._delay):
                self._late.append((to, event))
            else:
                self._events[to].append(event)


def cut_of(cluster: RoleCluster) -> Mapping[MetalogPosition, SeqNum]:
    """Return the tail after every published position."""
    return cluster.oracle.tails
