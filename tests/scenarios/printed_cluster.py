"""Real roles with a queue of messages and a disk for each, which print every step that they take.

A node behaves as under the shell (`indilog.runtime.node`): its role gets `Persisted` as soon as a
frame is written. Messages that promise something leave after the sync, the others at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, NamedTuple, assert_never

from indilog.base.errors import IndilogError
from indilog.base.ids import Epoch, Instant, NodeId
from indilog.base.log import Record
from indilog.config import Config
from indilog.kernel.cold import without_store
from indilog.kernel.index_snapshot import without_snapshots
from indilog.kernel.records import HEADER_BYTES
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
    Lost,
    Persist,
    Persisted,
    ReadFrame,
    Received,
    ReclaimableBytes,
    Role,
    Send,
    SnapshotsAnswered,
    Started,
    SurvivesLoss,
    TermBegun,
)
from indilog.runtime.cluster.assembly import role_of
from indilog.wire.messages import Message
from indilog_compute.reads.operation import Answered
from tests.scenarios.shown import Shown

ORIGIN: Final = 1000.0
"""Seconds since 1970 at which the cluster starts."""
DELIVERIES_MAX: Final = 2_000
"""Messages that `deliver_all` delivers before it fails."""
_SEGMENT: Final = 1
"""The number of the only journal segment of a node."""


class Letter(NamedTuple):
    """A message on its way, from one incarnation of its sender."""

    sender: NodeId
    to: NodeId
    message: Message
    incarnation: Epoch


@dataclass
class Frame:
    """A frame of a node's journal."""

    kind: FrameKind
    payload: bytes
    synced: bool = False
    damaged: bool = False


@dataclass
class Node:
    """A role and its disk."""

    name: NodeId
    role: Role | None = None
    """None: the node is down."""
    incarnation: int = 0
    frames: list[Frame] = field(default_factory=list)
    wiped: bool = False
    """Whether the next start has lost its journal."""
    holding: bool = False
    """Whether its frames are synced on demand only."""
    held: list[Letter] = field(default_factory=list)
    """Messages that wait for a sync."""

    def location(self, index: int) -> Location:
        """Return where the frame of this index is."""
        return Location(_SEGMENT, index, len(self.frames[index].payload))

    @property
    def unsynced(self) -> list[Frame]:
        """The frames that a loss of power takes away."""
        return [frame for frame in self.frames if not frame.synced]

    def sync(self) -> list[Letter]:
        """Sync all frames; return the messages that waited for that."""
        for frame in self.frames:
            frame.synced = True
        released, self.held = self.held, []
        return released


class PrintedCluster:
    """The roles of a view.

    Attributes:
        nodes: all nodes of the view, down or not.
        queue: messages on their way, in the order in which they were sent.
        now: seconds since 1970; changes in `wait` only.
        lines: what was printed.
        shown: how it was.
    """

    def __init__(self, view: View, config: Config) -> None:
        self._view = view
        self._config = config
        self.nodes = {name: Node(name) for name in view.nodes}
        self.queue: list[Letter] = []
        self._term = TermBegun(Epoch(0), view.sequencers[0])
        self.now = ORIGIN
        self.lines: list[str] = []
        self.shown = Shown(ORIGIN)

    # --- starts and stops of nodes

    def start(self, node: Node) -> None:
        """Start a node from what is on its disk."""
        node.role = role = role_of(node.name, [self._view], self._config)
        node.incarnation += 1
        self.lines.append(f"{node.name} starts, incarnation {node.incarnation}")
        try:
            self._recover(node, role)
        except IndilogError as error:
            self._fail(node, error)
            return
        if node.name == self._term.primary:
            self._term = TermBegun(Epoch(self._term.term + 1), node.name)
        self.turn(node, Started(Epoch(node.incarnation)), self._term)

    def elect(self, node: Node, without: Sequence[str]) -> None:
        """Begin a new term; the nodes that are up learn of it at once, but those of `without`."""
        self._term = TermBegun(Epoch(self._term.term + 1), node.name)
        for one in self.nodes.values():
            if one.role is not None and one.name not in without:
                self.lines.append(f"{one.name} learns of term {self._term.term}")
                self.turn(one, self._term)

    def _recover(self, node: Node, role: Role) -> None:
        if isinstance(role, SurvivesLoss) and node.wiped:
            role.lost(Lost(None, b"", Location(0, 0, 0)))
        node.wiped = False
        for index, frame in enumerate(node.frames):
            if isinstance(role, SurvivesLoss) and frame.damaged:
                role.lost(Lost(frame.kind, frame.payload, node.location(index)))
            else:
                role.recover(frame.kind, frame.payload, node.location(index))
        if isinstance(role, SurvivesLoss):
            role.recovered()

    def stop(self, node: Node) -> None:
        """End a process. Messages on their way to it are lost, with its connections."""
        node.role = None
        node.held.clear()
        self.queue = [letter for letter in self.queue if letter.to != node.name]
        self.lines.append(f"{node.name} is down")

    def lose(self, node: Node, frames: Sequence[Frame]) -> None:
        """Take frames from the disk of a node."""
        node.frames = [kept for kept in node.frames if not any(kept is f for f in frames)]
        self.lines += [f"lost: {self.shown.frame(f.kind, f.payload)}" for f in frames]

    def damage(self, node: Node, kind: FrameKind, *, tags: bool) -> None:
        """Flip a bit in the newest frame of a kind: in its last byte, or in a tag of a batch."""
        frames = [frame for frame in node.frames if frame.kind is kind]
        if not frames:
            raise ValueError(f"{node.name} has no {kind.name} frame")
        frame = frames[-1]
        self.lines.append(f"damaged: {self.shown.frame(kind, frame.payload)}")
        spoilt = bytearray(frame.payload)
        spoilt[HEADER_BYTES if tags else -1] ^= 1
        frame.payload, frame.damaged = bytes(spoilt), True

    def sync(self, node: Node) -> None:
        """Sync what a node has written; the messages that waited for it leave."""
        self.lines += [
            f"{node.name} syncs {self.shown.frame(frame.kind, frame.payload)}"
            for frame in node.unsynced
        ]
        released = node.sync()
        self._print([Send(letter.to, letter.message) for letter in released])
        self.queue += released

    # --- messages and time

    def line_of(self, letter: Letter) -> str:
        """Return a message with its sender and receiver."""
        line = f"{letter.sender} → {letter.to} {self.shown.message(letter.message)}"
        newest = self.nodes[letter.sender].incarnation
        return line if letter.incarnation == newest else f"{line} (of an earlier incarnation)"

    def deliver(self, letters: Sequence[Letter]) -> None:
        """Let messages arrive at their receiver, all in one turn."""
        node, lines = self.nodes[letters[0].to], [self.line_of(letter) for letter in letters]
        if node.role is None:
            self.lines += [f"lost, the receiver is down: {line}" for line in lines]
            return
        self.lines += lines
        events = [Received(sent.sender, sent.message, sent.incarnation) for sent in letters]
        self.turn(node, *events)

    def deliver_all(self) -> int:
        """Deliver until no message is queued; return how many were.

        Raises:
            ValueError: there were more than `DELIVERIES_MAX`.
        """
        for count in range(DELIVERIES_MAX):
            if not self.queue:
                return count
            self.deliver([self.queue.pop(0)])
        raise ValueError(f"messages are still sent after {DELIVERIES_MAX} were delivered")

    def wait(self, seconds: float) -> None:
        """Let time pass; a node has its turn when its deadline comes."""
        end = self.now + seconds
        while due := [
            (deadline, name)
            for name, node in self.nodes.items()
            if node.role and (deadline := node.role.deadline()) is not None and deadline <= end
        ]:
            deadline, name = min(due)
            self.now = max(self.now + 0.001, deadline)
            before = len(self.lines)
            self.turn(self.nodes[name])
            if len(self.lines) > before:
                self.lines.insert(before, f"{name} at {self.shown.seconds(self.now)}")
        self.now = max(self.now, end)

    # --- turns

    def call(self, node: Node, waiter: str, call: Callable[[], object]) -> None:
        """Let a caller call an engine, and the engine have its turn."""
        self.lines.append(f"{waiter} at {node.name}")
        try:
            call()
        except IndilogError as error:
            self.lines.append(f"  {waiter} fails: {type(error).__name__}: {error}")
        self.turn(node)

    def turn(self, node: Node, *events: Event) -> None:
        """Let a role react, and its disk answer, until neither has more to say; then sync."""
        following: Sequence[Event] = events
        done: list[Send | str] = []
        try:
            while node.role is not None:
                effects = node.role.handle(following, Instant(self.now))
                node.role.check_invariants()
                following = []
                for effect in effects:
                    done += [effect] if isinstance(effect, Send) else self._lines_of(node, effect)
                    following += self._perform(node, effect)
                if not following:
                    break
        except IndilogError as error:
            self._print(done)
            self._fail(node, error)
            return
        waits = node.holding and node.unsynced
        self._print(done, " after its sync" if waits else "")
        if not waits:
            self.queue += node.sync()

    def _fail(self, node: Node, error: IndilogError) -> None:
        self.lines.append(f"  {type(error).__name__}: {error}")
        self.stop(node)

    def _perform(self, node: Node, effect: Effect) -> list[Event]:
        """Do what an effect asks for; return the events that follow from it."""
        match effect:
            case Send(to, message):
                letter = Letter(node.name, to, message, Epoch(node.incarnation))
                (node.held if message.promises else self.queue).append(letter)
            case Persist(kind, payload, token):
                node.frames.append(Frame(kind, payload))
                return [Persisted(token, node.location(len(node.frames) - 1))]
            case ReadFrame(location, token):
                return [FrameRead(token, node.frames[location.offset].payload)]
            case AskSnapshots(request):
                return [SnapshotsAnswered(without_snapshots(request))]
            case AskCold(cold_request):
                return [ColdAnswered(without_store(cold_request))]
            case Discard(location):
                frame = node.frames[location.offset]
                rest = bytes(len(frame.payload) - HEADER_BYTES)
                frame.kind, frame.payload = FrameKind.GONE, frame.payload[:HEADER_BYTES] + rest
            case AskCells() | AnswerAppends() | Answer() | ReclaimableBytes() | Ignore():
                pass  # printed; no cell is kept here
            case unreachable:
                assert_never(unreachable)
        return []

    # --- printing

    def _print(self, done: Sequence[Send | str], waits: str = "") -> None:
        """Print lines, and the kinds of messages; the fields of messages are printed on delivery.

        `waits` is added to messages that promise something.
        """
        for kind, group in groupby(done, key=_kind_of):
            if kind is None:
                self.lines += map(str, group)
                continue
            receivers = ", ".join(send.to for send in group if isinstance(send, Send))
            self.lines.append(f"  → {receivers} {kind.__name__}{waits if kind.promises else ''}")

    def _lines_of(self, node: Node, effect: Effect) -> list[str]:  # noqa: PLR0911
        match effect:
            case Persist(kind, payload):
                return [f"  persists {self.shown.frame(kind, payload)}"]
            case ReadFrame(location):
                frame = node.frames[location.offset]
                return [f"  reads {self.shown.frame(frame.kind, frame.payload)}"]
            case Discard(location):
                frame = node.frames[location.offset]
                return [f"  discards {self.shown.frame(frame.kind, frame.payload)}"]
            case ReclaimableBytes(bytes_by_segment):
                reclaimable = sum(bytes_by_segment.values())
                return [f"  reclaimable bytes: {reclaimable}"] if reclaimable else []
            case AnswerAppends(waiters, first):
                seqnums = enumerate(waiters, first)
                return [f"  {w} succeeds: seqnum {n}" for n, w in seqnums if w is not None]
            case Answer(waiter, outcome):
                value = outcome.value if isinstance(outcome, Answered) else outcome
                return [f"  {waiter} {self.outcome(value)}"]
            case Ignore(_, reason):
                return [f"  ignores: {reason}"]
            case Send() | AskSnapshots() | AskCold() | AskCells():
                return []
            case unreachable:
                assert_never(unreachable)

    def outcome(self, value: object) -> str:
        """Return what the caller of an operation gets: a record, None or an exception."""
        match value:
            case Record():
                return f"succeeds: seqnum {value.seqnum} {value.data.decode()!r}"
            case None:
                return "succeeds: nothing"
            case Exception():
                return f"fails: {type(value).__name__}: {value}"
            case _:
                raise AssertionError(f"no operation of a scenario has this outcome: {value}")


def _kind_of(done: Send | str) -> type[Message] | None:
    return type(done.message) if isinstance(done, Send) else None
