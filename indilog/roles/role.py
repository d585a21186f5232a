"""What a role is: events and `now` in, effects out; no I/O inside (ARCHITECTURE 5, STYLE "Shape of
a role").

Events are past participles, effects imperatives. The shell (`indilog.runtime.node`) drains what
arrived, calls `handle` once for the whole batch and performs the effects in order.

**Durability.** A role emits `Persist` and acts on it when it is told `Persisted`. The shell may
tell it at once, before the sync: a process is the unit of failure, so it is enough that *nothing
leaves the process* (messages to other processes, answers to callers) before everything persisted
earlier is synced, but for messages that promise nothing about it (`Message.promises`). A failed
sync ends the process.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

from indilog.base.ids import Epoch, Instant, MetalogPosition, NodeId, SeqNum
from indilog.wire.messages import Message

if TYPE_CHECKING:
    from indilog.kernel.index_snapshot import SnapshotAnswer, SnapshotRequest


class FrameKind(enum.IntEnum):
    """What a frame of the journal holds; the number is its byte on disk."""

    RECORDS = 1
    """A record batch of a shard (storage)."""
    METALOG = 2
    """A metalog entry (sequencer)."""
    ORDERING = 3
    """A metalog entry that a storage node has applied: its ordering journal."""
    SHARD_STATE = 4
    """A writer's epoch and where it starts (storage)."""
    REPAIRED = 5
    """A record batch that another replica gave back (storage); its localids are older than others'.
    """
    GONE_RECORDS = 6
    """Which records were in batches that were discarded (`indilog.kernel.tombstones`): what is left
    of them when their segment is rewritten (storage). No role writes it.
    """
    METALOG_FETCHED = 7
    """As `METALOG`, but of a sequencer that lacks entries it had once, and is sent them again."""
    METALOG_FILLED = 8
    """As `METALOG`, but in a hole before others: it does not say where the metalog ended."""
    METALOG_STATE = 9
    """What a sequencer knows of its copy: whether it lacks something, and whom it follows no more
    (`indilog_ordering.stored_metalog`).
    """
    DISCARDED = 10
    """Which records were in batches that are discarded from now on (`indilog.kernel.tombstones`):
    what was recovered from a checkpoint is told so (storage).
    """
    CHECKPOINT = 11
    """Behind it a checkpoint was taken (`indilog.runtime.journal.checkpointing`); of no role, and
    empty.
    """
    MOVED = 12
    """Where the batches of a rewritten segment were written first
    (`indilog.runtime.journal.moved_frames`); of no role.
    """
    GONE = 0xAA
    """A record batch that was discarded (storage): of its payload the batch's header is left. Never
    written as such: the byte of a `RECORDS` frame is changed.
    """


METALOG_ENTRY_KINDS: Final = frozenset(
    {FrameKind.METALOG, FrameKind.METALOG_FETCHED, FrameKind.METALOG_FILLED}
)
"""Frames that hold a metalog entry of a sequencer."""
METALOG_KINDS: Final = METALOG_ENTRY_KINDS | {FrameKind.METALOG_STATE}
"""All that a sequencer writes."""


class Location(NamedTuple):
    """Where a frame's payload is: segment number, byte offset in it, length in bytes."""

    segment: int
    offset: int
    length: int


# --- events


class Started(NamedTuple):
    """The first event: recovery is over, `recover` was called for every frame of this role."""

    epoch: Epoch


class Received(NamedTuple):
    """A message came in.

    Attributes:
        sender: the node that sent it.
        message: what it says.
        incarnation: the epoch that the sender's process took when it started. A greater one means
            that the sender has restarted since, perhaps without its disk: then it has forgotten
            what an earlier incarnation said, and its newer word holds even if it says less.
            Messages that the transport delayed may still come from an earlier incarnation.
    """

    sender: NodeId
    message: Message
    incarnation: Epoch


class Persisted(NamedTuple):
    """The frame of that `Persist` is as durable as whatever promises it from now on."""

    token: int
    location: Location


class FrameRead(NamedTuple):
    """The payload that a `ReadFrame` asked for; None: damaged or gone."""

    token: int
    payload: bytes | None


class SnapshotsAnswered(NamedTuple):
    """The answer to an `AskSnapshots`."""

    answer: SnapshotAnswer


class SpaceChanged(NamedTuple):
    """The disk is full but for `room` bytes, a role's share for batches under way; None: no longer.

    Told to roles that persist (`SurvivesLoss`). What they write beyond `room` is kept waiting.
    """

    room: int | None


Event: TypeAlias = Started | Received | Persisted | FrameRead | SnapshotsAnswered | SpaceChanged


# --- effects


class Send(NamedTuple):
    """Send `message` to `to`. It may be lost, repeated or late; never changed.

    Not `urgent`: no caller waits for it, so within a process it may wait a moment for others to
    come together with it.
    """

    to: NodeId
    message: Message
    urgent: bool = True


class Persist(NamedTuple):
    """Write a frame to this role's journal, then say `Persisted(token)`."""

    kind: FrameKind
    payload: bytes
    token: int


class ReadFrame(NamedTuple):
    """Read a frame back, then say `FrameRead(token)`."""

    location: Location
    token: int


class AskSnapshots(NamedTuple):
    """Open, write or read a snapshot of this index node, then say `SnapshotsAnswered`.

    A shell that keeps no snapshots answers that there are none and that none was written.
    """

    request: SnapshotRequest


Ordered: TypeAlias = tuple[SeqNum, MetalogPosition]
"""What the caller of an append is told: where its record is, and the position that ordered it."""


class Appended(NamedTuple):
    """Tell the callers in `waiters` that their records got the seqnums `first`, `first + 1`, ...
    (each is told its `Ordered`); the entry before `position` ordered them.

    None stands for a record of an atomic batch after its first, whose waiter speaks for all.
    """

    waiters: Sequence[object | None]
    first: SeqNum
    position: MetalogPosition


class Answer(NamedTuple):
    """Tell one caller the outcome of its operation: a value, or an exception to raise."""

    waiter: object
    outcome: object


class Discard(NamedTuple):
    """Give back the room of a `RECORDS` frame that nobody will read again; recovery says `GONE`.

    Done after the next sync, because what makes it superfluous may not be durable before.
    """

    location: Location


class ReclaimableBytes(NamedTuple):
    """So many bytes of frames that this role still needs, by the segments of their locations, are
    not needed: `Shrinks.needed` leaves them out when a segment is rewritten. All of it, anew.

    `began`: when the role began to look; what was not needed later it looks for again.
    """

    bytes_by_segment: Mapping[int, int]
    began: Instant


class Ignore(NamedTuple):
    """Count and log something that came from outside and has no place here."""

    event: object
    reason: str


Effect: TypeAlias = (
    Send
    | Persist
    | ReadFrame
    | AskSnapshots
    | Appended
    | Answer
    | Discard
    | ReclaimableBytes
    | Ignore
)


class Role(Protocol):
    """One node's logic, as a value."""

    def recover(self, kind: FrameKind, payload: bytes, location: Location, /) -> None:
        """Take in one frame that this role persisted before; called in order, before `Started`."""

    def handle(self, events: Sequence[Event], now: Instant) -> list[Effect]:
        """React to a batch of events."""

    def deadline(self) -> Instant | None:
        """When to call `handle([], now)` even without events."""

    def check_invariants(self) -> None:
        """Assert cheap local facts; the real checkers live outside."""


class Lost(NamedTuple):
    """A frame that was persisted once and cannot be read any more.

    Attributes:
        kind: None: not even that is known, nor whether it was of this role.
        payload: what is there instead of its payload; not to be trusted.
        location: where that is.
    """

    kind: FrameKind | None
    payload: bytes
    location: Location


@runtime_checkable
class SurvivesLoss(Protocol):
    """A role that persists, and can go on when a part of that is damaged (decision 0009)."""

    def lost(self, frame: Lost, /) -> None:
        """Take note of a loss; told in the order of the journal, between the `recover`s."""

    def recovered(self) -> None:
        """Judge, when all frames were told, whether the role can go on.

        Raises:
            DataLossError: it cannot: one sentence that says what is missing.
        """


@runtime_checkable
class Checkpoints(Protocol):
    """A role that starts from a checkpoint, and then recovers only what was persisted later
    (decision 0028).
    """

    @property
    def derived(self) -> bool:
        """Whether all that it has can be fetched from others. Then its part of a checkpoint is
        passed over where the role is retired; of other roles a start without them is refused.
        """

    @property
    def unsaved(self) -> int:
        """How much a start would do again beside replaying frames, about, in frames: what neither
        a frame nor a durable checkpoint holds.
        """

    def checkpoint(self) -> Callable[[], bytes]:
        """Copy the state that all frames written by now add up to; return what encodes the copy.

        Called between two turns, when every `Persist` was answered. What is returned may be called
        once, in another thread.
        """

    def restore(self, payload: bytes, gone: Collection[int], /) -> None:
        """Begin with that state instead of with nothing; called before `recover`.

        Args:
            payload: what was encoded, intact.
            gone: numbers of segments, older than the checkpoint, that cannot be found any more.

        Raises:
            MalformedFrameError: it is of a version that this release does not know.
        """


@runtime_checkable
class NotesCheckpoints(Protocol):
    """A role that tells others what its checkpoints cover."""

    def checkpointed(self) -> None:
        """Take note that what `checkpoint` copied last is durable, and so are two checkpoints with
        the one before it, if there was one.
        """


@runtime_checkable
class TakesCopies(Protocol):
    """A role that can replace what it lost from `ORDERING` frames of the same journal."""

    def copied(self, payload: bytes, /) -> None:
        """Take in such a frame of any role; told in the order of the journal."""


@runtime_checkable
class Shrinks(Protocol):
    """A role that does not need all of the record batches that it persisted (decision 0016)."""

    def needed(self, kind: FrameKind, payload: bytes, location: Location, /) -> bytes | None:
        """Return what must stay of a batch: all of it, or a smaller one of as many records; None:
        nothing, but that these records are gone.

        Changes nothing. What it says rests on what was persisted before, and is followed when that
        is durable. `location` is the one by which the role knows the batch.
        """


@runtime_checkable
class ReportsStatus(Protocol):
    """A role with figures for people."""

    def status(self) -> Mapping[str, object]:
        """Return them by name."""


@runtime_checkable
class ServesCallers(Protocol):
    """A role that callers in its process wait for."""

    def abandon(self) -> Sequence[Effect]:
        """Return the answers that tell everyone who waits that nothing will come any more."""
