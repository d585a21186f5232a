"""The contract of a role: events and `now` in, effects out; no I/O inside (ARCHITECTURE 5, STYLE
"Shape of a role").

Events are past participles, effects imperatives. The shell (`indilog.runtime.node`) drains what
arrived, calls `handle` once for the whole batch and performs the effects in order.

**Durability.** A role emits `Persist` and acts on it after `Persisted`. `Persisted` may come before
the sync, because a process is the unit of failure. It is enough that *nothing leaves the process*
(messages to other processes, answers to callers) before everything persisted earlier is synced.
Messages that promise nothing durable (`WireMessage.promises`) may leave before, if no other role of
the process persists. A failed sync ends the process.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

from indilog.base.ids import Epoch, Instant, MetalogPosition, NodeId, SeqNum
from indilog.wire.cell_messages import CellAnswer, CellQuestion
from indilog.wire.messages import Message

if TYPE_CHECKING:
    from indilog.kernel.cold import ColdAnswer, ColdRequest
    from indilog.kernel.index_snapshot import SnapshotAnswer, SnapshotRequest
    from indilog.kernel.view import Members


class FrameKind(enum.IntEnum):
    """What a frame of the journal holds; the number is its byte on disk."""

    RECORDS = 1
    """A record batch of a shard (storage)."""
    METALOG = 2
    """A metalog entry (sequencer)."""
    ORDERING = 3
    """Metalog entries that a storage node has applied: its ordering journal."""
    REPAIRED = 5
    """A record batch fetched from another replica (storage). Its localids are lower than those of
    frames before it.
    """
    GONE_RECORDS = 6
    """Which records were in discarded batches (`indilog.kernel.tombstones`; storage). The shell
    writes it when it rewrites their segment.
    """
    METALOG_STATE = 9
    """The state of a sequencer's copy: whether it may lack entries, and which terms it refuses
    (`indilog_ordering.stored_metalog`).
    """
    DISCARDED = 10
    """Which records are in batches that are discarded from here on (`indilog.kernel.tombstones`),
    so that a recovery from a checkpoint knows it (storage).
    """
    CHECKPOINT = 11
    """A checkpoint was taken after this frame (`indilog.runtime.journal.checkpointing`). It belongs
    to no role and is empty.
    """
    MOVED = 12
    """The original places of the batches in a rewritten segment
    (`indilog.runtime.journal.moved_frames`). It belongs to no role.
    """
    COLD = 13
    """Which records are in an object on cold storage from here on (`indilog.kernel.cold`); their
    batches are no longer needed in the journal (storage).
    """
    FREED = 14
    """Which records of a shard are missing from here on, because the shard was moved to another
    node and their bytes are freed (`indilog.kernel.tombstones`; storage).
    """
    GONE = 0xAA
    """A record batch that was discarded (storage); of its payload only the header of the batch
    remains. Such a frame is never written: the kind byte of a `RECORDS` frame is changed to this.
    """


ELSEWHERE: Final = b""
"""What `Shrinks.needed` returns for a batch whose records a later frame places elsewhere."""
METALOG_KINDS: Final = frozenset({FrameKind.METALOG, FrameKind.METALOG_STATE})
"""The kinds of frames that a sequencer writes."""


class Location(NamedTuple):
    """Where a frame's payload is: segment number, byte offset in it, length in bytes."""

    segment: int
    offset: int
    length: int


# --- events


class Started(NamedTuple):
    """The first event: recovery is over, `recover` was called for every frame of this role."""

    epoch: Epoch


class TermBegun(NamedTuple):
    """A term was given to a sequencer: it is the primary until a newer term begins.

    The metadata store assigns terms (`indilog.runtime.cluster.terms`). They grow, and no two
    primaries share one. A process learns the newest term at its start, if there is one. It learns
    later terms some time after they began, and may miss some of them.
    """

    term: Epoch
    primary: NodeId


class MembersWanted(NamedTuple):
    """The cluster should have these nodes; the primary proposes a view with them.

    The metadata store keeps the wanted members. A process learns the newest ones at its start, and
    later ones some time after they were set.
    """

    members: Members


class Received(NamedTuple):
    """A message arrived.

    Attributes:
        sender: the node that sent it.
        message: the message.
        incarnation: the epoch that the sender's process took when it started. A greater one means
            that the sender has restarted since, perhaps without its disk. Its newer reports then
            replace those of earlier incarnations, even if they claim less. Delayed messages may
            still come from an earlier incarnation.
    """

    sender: NodeId
    message: Message
    incarnation: Epoch


class Persisted(NamedTuple):
    """The frame of a `Persist` was written. Messages that promise it leave the process only when it
    is durable.
    """

    token: int
    location: Location


class FrameRead(NamedTuple):
    """The payload that a `ReadFrame` requested; None: it is damaged or gone."""

    token: int
    payload: bytes | None


class SnapshotsAnswered(NamedTuple):
    """The answer to an `AskSnapshots`."""

    answer: SnapshotAnswer


class ColdAnswered(NamedTuple):
    """The answer to an `AskCold`."""

    answer: ColdAnswer


class CellsAnswered(NamedTuple):
    """The answer to an `AskCells`, for the node `to`."""

    to: NodeId
    answer: CellAnswer


class SpaceChanged(NamedTuple):
    """The disk is full except for `room` bytes, the role's share for batches in flight; None: the
    disk has room again.

    Sent to roles that persist (`SurvivesLoss`). Frames beyond `room` wait in the shell.
    """

    room: int | None


Event: TypeAlias = (
    Started
    | TermBegun
    | MembersWanted
    | Received
    | Persisted
    | FrameRead
    | SnapshotsAnswered
    | ColdAnswered
    | CellsAnswered
    | SpaceChanged
)


# --- effects


class Send(NamedTuple):
    """Send `message` to `to`. The message may be lost, repeated or late, but is never changed.

    Not `urgent`: no caller waits for the message. Within a process the message may then wait for
    further ones, so that its receiver handles them together.
    """

    to: NodeId
    message: Message
    urgent: bool = True


class Persist(NamedTuple):
    """Write a frame to this role's journal, then answer with `Persisted(token)`."""

    kind: FrameKind
    payload: bytes
    token: int


class ReadFrame(NamedTuple):
    """Read a frame back, then answer with `FrameRead(token)`."""

    location: Location
    token: int


class AskSnapshots(NamedTuple):
    """Open, write or read a snapshot of this index node, then answer with `SnapshotsAnswered`.

    A shell without snapshots answers that there are none and that none was written.
    """

    request: SnapshotRequest


class AskCold(NamedTuple):
    """List, write, read or delete objects of this storage node on cold storage, then answer with
    `ColdAnswered`.

    If the shell cannot reach a cold store, the answer says so.
    """

    request: ColdRequest


class AskCells(NamedTuple):
    """Answer a question of the node `sender` about the cells of this storage node, then return
    `CellsAnswered`. The answer is durable. There may be none if the process ends.
    """

    sender: NodeId
    question: CellQuestion


Ordered: TypeAlias = tuple[SeqNum, MetalogPosition]
"""The result of an append: the seqnum of its record, and the position of the entry that ordered
it.
"""


class AnswerAppends(NamedTuple):
    """Answer the callers in `waiters`: their records got the seqnums `first`, `first + 1`, ...
    (each caller gets its `Ordered`); the entry before `position` ordered them.

    An atomic batch has one waiter, at its first record; None stands for each of its other records.
    """

    waiters: Sequence[object | None]
    first: SeqNum
    position: MetalogPosition


class Answer(NamedTuple):
    """Give one caller the outcome of its operation: a value, or an exception to raise."""

    waiter: object
    outcome: object


class Discard(NamedTuple):
    """Free the space of a `RECORDS` frame that is never read again; recovery then finds `GONE`.

    The frame is freed after the next sync, because the reason for it may not be durable before.

    `elsewhere`: a later frame names another place of the records. The frame then stays as it is
    until its segment is rewritten, so recovery may or may not find it.
    """

    location: Location
    elsewhere: bool = False


class ReclaimableBytes(NamedTuple):
    """Unneeded bytes inside needed frames of this role, by segment.

    These numbers replace all earlier ones of the role.

    `Shrinks.needed` leaves these bytes out when a segment is rewritten. `began`: when the role
    began to count; bytes that became unneeded later are reported the next time.
    """

    bytes_by_segment: Mapping[int, int]
    began: Instant


class Ignore(NamedTuple):
    """Count and log an event from another process that is not valid now."""

    event: object
    reason: str


Effect: TypeAlias = (
    Send
    | Persist
    | ReadFrame
    | AskSnapshots
    | AskCold
    | AskCells
    | AnswerAppends
    | Answer
    | Discard
    | ReclaimableBytes
    | Ignore
)


class Role(Protocol):
    """One node's logic, as a value."""

    def recover(self, kind: FrameKind, payload: bytes, location: Location, /) -> None:
        """Replay one frame that this role persisted; called in the order of the journal, before
        `Started`.
        """

    def handle(self, events: Sequence[Event], now: Instant) -> list[Effect]:
        """React to a batch of events."""

    def deadline(self) -> Instant | None:
        """When to call `handle([], now)` even without events."""

    def check_invariants(self) -> None:
        """Assert cheap local facts."""


class Lost(NamedTuple):
    """A frame that was persisted and can no longer be read.

    Attributes:
        kind: the kind of the frame; None: it is unknown, and the frame may have been another
            role's.
        payload: the bytes in place of its payload; not to be trusted.
        location: where they are.
    """

    kind: FrameKind | None
    payload: bytes
    location: Location


@runtime_checkable
class SurvivesLoss(Protocol):
    """A role that persists and can continue when some of its frames are damaged (decision 0009)."""

    def lost(self, frame: Lost, /) -> None:
        """Note a loss; called in the order of the journal, between calls of `recover`."""

    def recovered(self) -> None:
        """Decide, after all frames, whether the role can continue.

        Raises:
            DataLossError: it cannot; one sentence that says what is missing.
        """


@runtime_checkable
class Checkpoints(Protocol):
    """A role that starts from a checkpoint, and then recovers only what was persisted after it
    (decision 0028).
    """

    @property
    def derived(self) -> bool:
        """Whether all of its state can be fetched from other nodes. If the role is retired, its
        part of a checkpoint is then ignored; otherwise a start without the role is refused.
        """

    @property
    def unsaved(self) -> int:
        """The work that a checkpoint taken now would save the next start, in addition to the replay
        of frames. An estimate as a number of frames; 0 directly after `checkpoint`.
        """

    def checkpoint(self) -> Callable[[], bytes]:
        """Copy the state after all frames written so far; return a function that encodes the copy.

        Called between two iterations, when every `Persist` was answered. The function may be called
        once, in another thread.
        """

    def restore(self, payload: bytes, gone: Collection[int], /) -> None:
        """Start from a checkpoint; called before `recover`.

        Args:
            payload: the bytes that `checkpoint` encoded, intact.
            gone: numbers of segments, older than the checkpoint, that no longer exist.

        Raises:
            MalformedFrameError: the payload is of a version that this release does not know.
        """


@runtime_checkable
class NotesCheckpoints(Protocol):
    """A role that announces to other nodes what its checkpoints cover."""

    def checkpointed(self) -> None:
        """Note that the last checkpoint is durable. If there was one before it, two are durable
        now.
        """


@runtime_checkable
class WantsCheckpoints(Protocol):
    """A role that frees disk space only after further checkpoints."""

    @property
    def wants_checkpoint(self) -> bool:
        """Whether a checkpoint is to be written now. It must become False after two of them."""


@runtime_checkable
class TakesCopies(Protocol):
    """A role that can replace lost frames from `ORDERING` frames of the same journal."""

    def copied(self, payload: bytes, /) -> None:
        """Handle an `ORDERING` frame of any role; called in the order of the journal."""


@runtime_checkable
class Shrinks(Protocol):
    """A role that no longer needs some of the record batches that it persisted (decision 0016)."""

    def needed(self, kind: FrameKind, payload: bytes, location: Location, /) -> bytes | None:
        """Return the part of a batch that must stay: all of it, or a smaller batch with tombstones.
        None: only a note that these records are gone. `ELSEWHERE`: nothing, because a later frame
        names the new place of the records. A replay without a checkpoint needs the batch for that
        frame.

        The method changes nothing. Its answer depends on frames persisted before, and is used only
        when these frames are durable. `location` is the one by which the role knows the batch.
        """


@runtime_checkable
class ReportsStatus(Protocol):
    """A role with a status for operators."""

    def status(self) -> Mapping[str, object]:
        """Return the counters by name."""


@runtime_checkable
class ServesCallers(Protocol):
    """A role that callers in its process wait for."""

    def abandon(self) -> Sequence[Effect]:
        """Return an answer for each waiting caller, because the role stops."""
