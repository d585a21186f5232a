"""A storage node with a disk that can be delayed, damaged and read again after a restart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from indilog.base.ids import Epoch, Instant, NodeId, ShardId, TagColumns, ViewNumber, pack_tags
from indilog.config import ClusterConfig, Config, node_config
from indilog.kernel.metalog import NewRecords, NewWriters
from indilog.kernel.records import HEADER_BYTES, BatchBuilder
from indilog.kernel.view import View, view_of
from indilog.roles.role import (
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
    Send,
    Started,
)
from indilog.wire.messages import (
    AppendBatch,
    Message,
    MetalogEntries,
    MetalogWanted,
    ReadRecords,
    RecordsRead,
    ShardProgress,
)
from indilog_storage import StorageNode
from tests.support.metalog_messages import entries_message, nothing_more

PRIMARY = NodeId("sequencer-0")
ENGINE = NodeId("engine-0")
STORAGE = NodeId("storage-0")
INDEX = NodeId("index-0-0")
SHARD = ShardId(0)
SEGMENT_BYTES = 4000

Frame = tuple[FrameKind, bytes, Location]


class Taken(NamedTuple):
    """A checkpoint, and the frames before it."""

    frames: list[Frame]
    payload: bytes


class Machine:
    """Drives a storage node and performs its effects, at once or on `confirm`.

    Attributes:
        frames: what is on its disk.
        holding: whether frames are only confirmed by `confirm`.
        held: the frames that wait for `confirm`.
        ignored: the reasons of ignored messages.
    """

    def __init__(
        self,
        view: View | None = None,
        config: Config | None = None,
        node: NodeId = STORAGE,
        frames: Iterable[Frame] = (),
        spoilt: Iterable[Location] = (),
        checkpoint: Taken | None = None,
        lost: Lost | None = None,
    ) -> None:
        self.view = view or view_of()
        self.config = config or Config()
        self.name = node
        self.node = StorageNode(node, [self.view], self.config)
        self.now = Instant(100.0)
        self.frames: list[Frame] = []
        self.holding = False
        self.held: list[Event] = []
        self.ignored: list[str] = []
        self.discarded: list[Location] = []
        self.reclaimable: dict[int, int] = {}
        self.reclaimable_since: Instant | None = None
        self.asked: MetalogWanted | None = None
        """The last question to the primary."""
        self.reads = 0
        self.read_places: list[Location] = []
        """The locations that it has read, in order."""
        self.spoilt = set(spoilt)
        """The damaged frames."""
        self.unreadable: set[Location] = set()
        """The frames that cannot be read now."""
        self.checkpoint = checkpoint
        if checkpoint is not None:
            self.node.restore(checkpoint.payload, ())
            self.frames += checkpoint.frames
        for kind, payload, location in [*frames][len(self.frames) :]:
            if lost is not None and location == lost.location:
                self.node.lost(lost)
            elif location in self.spoilt:
                self.node.lost(Lost(kind, payload, location))
            else:
                self.node.recover(kind, payload, location)
            self.frames.append((kind, payload, location))
        self.node.recovered()
        self.started = self.turn(Started(Epoch(1)))

    def restarted(self) -> Machine:
        """Restart: return a new node on the same disk."""
        kept = self.checkpoint
        if kept is not None and kept.frames != self.frames[: len(kept.frames)]:
            kept = None  # the checkpoint was taken after the lost frames
        return Machine(self.view, self.config, self.name, self.frames, self.spoilt, kept)

    def restarted_without(self, index: int, *, kind: bool, payload: bool) -> Machine:
        """Restart; of the frame at `index` so much is left."""
        of_kind, data, location = self.frames[index]
        lost = Lost(of_kind if kind else None, data if payload else b"", location)
        return Machine(
            self.view, self.config, self.name, self.frames, self.spoilt, self.checkpoint, lost
        )

    def take_checkpoint(self) -> None:
        """Take a checkpoint, from which a restart begins; all writes must be confirmed."""
        assert not self.held
        self.checkpoint = Taken([*self.frames], self.node.checkpoint()())

    def tell(self, *messages: Message, sender: NodeId = ENGINE, incarnation: int = 1) -> list[Send]:
        """Deliver messages in one iteration; return what is sent until the node is idle."""
        return self.turn(*(Received(sender, message, Epoch(incarnation)) for message in messages))

    def open(self, epoch: int = 1, *shards: int) -> list[Send]:
        """Let the primary give these shards, or all shards of the view, to writers `epoch`, in the
        next entry.
        """
        named = new_writers(self.node.position, epoch, *(shards or self.view.shards))
        return self.tell(entries_message((named,)), sender=PRIMARY)

    def nothing_more(self) -> list[Send]:
        """Deliver the primary's answer that there are no more entries."""
        assert self.asked is not None
        return self.tell(nothing_more(self.asked), sender=PRIMARY)

    def turn(self, *events: Event) -> list[Send]:
        """Deliver events in one iteration."""
        sent: list[Send] = []
        pending: Sequence[Event] = events
        while True:
            effects = self.node.handle(pending, self.now)
            self.node.check_invariants()
            following = [event for effect in effects for event in self._perform(effect, sent)]
            if not following:
                return sent
            pending = following

    @property
    def busy(self) -> bool:
        """Whether the node has work to do besides the periodic verification of its disk."""
        due = self.node.deadline()
        return due is not None and due < self.now + 3600

    def confirm(self) -> list[Send]:
        """Confirm the held frames."""
        held, self.held = self.held, []
        return self.turn(*held)

    def wait(self, seconds: float) -> list[Send]:
        """Advance the clock; the node is called at its deadline."""
        self.now = Instant(self.now + seconds)
        due = self.node.deadline()
        return self.turn() if due is not None and due <= self.now else []

    def _perform(self, effect: Effect, sent: list[Send]) -> list[Event]:
        match effect:
            case Send():
                sent.append(effect)
                if isinstance(effect.message, MetalogWanted):
                    self.asked = effect.message
            case Persist(kind, payload, token):
                location = self._place(len(payload))
                self.frames.append((kind, payload, location))
                if not self.holding:
                    return [Persisted(token, location)]
                self.held.append(Persisted(token, location))
            case ReadFrame(location, token):
                self.reads += 1
                self.read_places.append(location)
                payloads = [frame[1] for frame in self.frames if frame[2] == location]
                if location in self.unreadable:
                    payloads = []
                return [FrameRead(token, payloads[0] if payloads else None)]
            case Discard(location):
                self.discarded.append(location)
            case ReclaimableBytes(by_segment, began):
                self.reclaimable, self.reclaimable_since = dict(by_segment), began
            case Ignore(_, reason):
                self.ignored.append(reason)
            case _:
                raise AssertionError(f"not an effect of a storage node: {effect}")
        return []

    def _place(self, length: int) -> Location:
        if not self.frames:
            return Location(1, 32, length)
        last = self.frames[-1][2]
        end = last.offset + last.length
        if end + length > SEGMENT_BYTES:
            return Location(last.segment + 1, 32, length)
        return Location(last.segment, end + 32, length)

    def damage(self, index: int, *, tags: bool = False) -> None:
        """Change a byte of a frame on the disk: the last one, or (of a batch) one of its tags."""
        kind, payload, location = self.frames[index]
        spoilt = bytearray(payload)
        spoilt[HEADER_BYTES if tags else -1] ^= 1
        self.frames[index] = (kind, bytes(spoilt), location)
        self.spoilt.add(location)


def config_of(**node: float) -> Config:
    """Return a configuration with some limits changed; each entry is journaled at once."""
    node = {"ordering_frame_entries": 1, **node}
    return Config(node=node_config(**node))


def small_batches(batch_bytes_max: int) -> Config:
    """Return a configuration with small batches."""
    return Config(cluster=ClusterConfig(record_bytes_max=1000, batch_bytes_max=batch_bytes_max))


def batch(
    first: int,
    data: Sequence[bytes] = (b"data",),
    *,
    shard: int = SHARD,
    epoch: int = 1,
    tags: Sequence[int] = (7,),
) -> bytes:
    """Return a batch; each record has `tags`, and as many further ones as its place in it."""
    builder = BatchBuilder()
    for index, datum in enumerate(data):
        columns = TagColumns(pack_tags(*tags, *range(100, 100 + index)), b"log")
        builder.add(datum, columns)
    return builder.build(shard=ShardId(shard), epoch=Epoch(epoch), first=first, time_us=5)


def entry(position: int, counts: dict[int, int]) -> NewRecords:
    """Return the metalog entry at `position`."""
    ordered = {ShardId(shard): count for shard, count in counts.items()}
    return NewRecords(position, ViewNumber(1), Epoch(1), ordered)


def new_writers(position: int, epoch: int = 1, *shards: int) -> NewWriters:
    """Return the metalog entry at `position` that gives shards, or `SHARD`, to writers `epoch`."""
    named = {ShardId(shard): Epoch(epoch) for shard in shards or (SHARD,)}
    return NewWriters(position, ViewNumber(1), Epoch(1), named)


def entries(*cuts: dict[int, int], start: int = 1) -> MetalogEntries:
    """Return the entries from position `start` on that order `cuts`; the entry at 0 names the first
    writers (`machine_of`).
    """
    return entries_message(tuple(entry(start + index, cut) for index, cut in enumerate(cuts)))


def all_entries(*cuts: dict[int, int]) -> MetalogEntries:
    """Return the entries from the first one on: one that gives `SHARD` to the writer of epoch 1,
    and those that order `cuts`.
    """
    ordering = (entry(position, cut) for position, cut in enumerate(cuts, start=1))
    return entries_message((new_writers(0), *ordering))


def progress(stored: dict[ShardId, tuple[Epoch, int]], *, term: int = 0) -> ShardProgress:
    """Return a report to the primary; by default no term is known."""
    return ShardProgress(Epoch(term), stored)


def messages(sent: Iterable[Send], to: NodeId | None = None) -> list[Message]:
    """Return the messages sent, to one node or to all."""
    return [send.message for send in sent if to is None or send.to == to]


def machine_of(view: View | None = None, node: NodeId = STORAGE, **limits: float) -> Machine:
    """Return a node on which the first entry gave all shards to writers of epoch 1."""
    machine = Machine(view, config_of(**limits), node)
    machine.open()
    machine.nothing_more()
    return machine


def append(machine: Machine, *data: bytes, first: int, shard: int = SHARD) -> None:
    machine.tell(AppendBatch(batch(first, data, shard=shard)))


def read(machine: Machine, *seqnums: int, shard: int = SHARD) -> RecordsRead:
    """Read and return the answer."""
    sent = machine.tell(ReadRecords(1, ENGINE, ShardId(shard), seqnums), sender=INDEX)
    (answer,) = messages(sent, ENGINE)
    assert isinstance(answer, RecordsRead)
    return answer


def data_of(answer: RecordsRead) -> list[tuple[int, bytes]]:
    return [(record.seqnum, record.data) for record in answer.records]
