"""A storage node under any order, loss, repetition and restart, against a dictionary.

The model holds the batches that a writer sent, the order (seqnum → record), and the frames that the
disk confirmed. It uses only the messages of the node, never its internal state.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from indilog.base.ids import Epoch, Instant, ShardId
from indilog.config import Config, node_config
from indilog.kernel.metalog import NewRecords
from indilog.kernel.view import view_of
from indilog.roles.role import FrameKind, Send
from indilog.wire.messages import (
    AppendBatch,
    IndexBlock,
    IndexData,
    IndexDataWanted,
    ReadRecords,
    RecordsRead,
    ShardClaim,
    ShardClaimed,
    ShardOpen,
    ShardOpened,
    ShardProgress,
)
from tests.support.metalog_messages import entries_message
from tests.unit.storage.machine import ENGINE, INDEX, PRIMARY, Machine, batch, entry, messages

SHARDS = (0, 1)


class Sent:
    """A batch that a writer sent."""

    def __init__(self, shard: int, first: int, epoch: int, size: int) -> None:
        self.first = first
        self.data = [f"{shard}/{first + n}/{epoch}".encode() * 3 for n in range(size)]
        self.end = first + size
        self.tag = 1000 * epoch + first
        self.payload = batch(first, self.data, shard=shard, epoch=epoch, tags=(self.tag,))

    def record(self, localid: int) -> tuple[bytes, list[int]]:
        """Return data and tags of one record (see `batch`)."""
        index = localid - self.first
        return self.data[index], [self.tag, *range(100, 100 + index)]


class Writer:
    """State of one shard in the model: its writer's epoch, and the records sent, ordered and
    reported.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.batches: list[Sent] = []
        self.ordered = 0
        self.reported = 0

    @property
    def end(self) -> int:
        return self.batches[-1].end if self.batches else 0

    def ends(self, upto: int) -> list[int]:
        """Positions where a cut or a new writer may begin: batch ends from the ordered position
        on.
        """
        return [self.ordered] + [b.end for b in self.batches if self.ordered < b.end <= upto]


class StorageOfTwoShards(RuleBasedStateMachine):
    """One node, two shards, a small cache, a disk that loses unconfirmed frames."""

    @initialize(
        cache=st.sampled_from([0, 300, 100_000]),
        page=st.sampled_from([1, 200, 10_000]),
        entries=st.sampled_from([1, 3, 64]),
    )
    def start(self, cache: int, page: int, entries: int) -> None:
        node = node_config(
            record_cache_bytes_max=cache,
            page_bytes_max=page,
            read_timeout_s=1e9,
            ordering_frame_entries=entries,
        )
        self.machine = Machine(view_of(engines=2), Config(node=node))
        self.writers = {shard: Writer() for shard in SHARDS}
        self.metalog: list[NewRecords] = []
        self.truth: dict[int, tuple[int, bytes, list[int]]] = {}
        self.reading: dict[int, tuple[int, ...]] = {}
        self.requests = 0
        for shard in SHARDS:
            self.take_over(shard, 0)

    # --- messages of the node

    def hear(self, sent: Iterable[Send]) -> None:
        for message in messages(sent):
            if isinstance(message, ShardProgress):
                self.hear_progress(message)
            elif isinstance(message, RecordsRead):
                self.hear_records(message)
            elif isinstance(message, IndexData):
                for block in message.blocks:
                    self.check_block(block)

    def hear_progress(self, message: ShardProgress) -> None:
        confirmed = self.confirmed_payloads()
        for shard, (epoch, stored) in message.stored.items():
            writer = self.writers[shard]
            assert all(b.payload in confirmed for b in writer.batches if b.end <= stored)
            assert stored <= writer.end
            if epoch == writer.epoch:
                writer.reported = stored

    def confirmed_payloads(self) -> set[bytes]:
        held = {getattr(event, "location", None) for event in self.machine.held}
        return {frame[1] for frame in self.machine.frames if frame[2] not in held}

    def hear_records(self, message: RecordsRead) -> None:
        wanted = self.reading.pop(message.request)
        assert message.unknown == tuple(s for s in wanted if self.truth[s][0] != message.shard), (
            "exactly the records of other shards are unknown"
        )
        assert message.records or len(message.unknown) == len(wanted)
        for record in message.records:
            assert record.seqnum in wanted
            assert (message.shard, record.data) == self.truth[record.seqnum][:2]

    def check_block(self, block: IndexBlock) -> None:
        assert block.productive == tuple(sorted(self.metalog[block.position].counts))
        assert block.tail == sum(
            sum(before.counts.values()) for before in self.metalog[: block.position + 1]
        )
        for part in block.parts:
            tags = iter(array("Q", part.tags))
            for index, count in enumerate(part.tag_counts):
                shard, _, expected = self.truth[part.first_seqnum + index]
                assert (shard, expected) == (part.shard, [next(tags) for _ in range(count)])
            assert len(part.tag_counts) == part.count

    # --- writers

    def resend(self, shard: int) -> None:
        unordered = [b for b in self.writers[shard].batches if b.end > self.writers[shard].ordered]
        self.hear(self.machine.tell(*[AppendBatch(b.payload) for b in unordered]))

    @rule(shard=st.sampled_from(SHARDS), size=st.integers(1, 4))
    def append(self, shard: int, size: int) -> None:
        """Resend unordered batches, and send a new batch."""
        writer = self.writers[shard]
        writer.batches.append(Sent(shard, writer.end, writer.epoch, size))
        self.resend(shard)

    @rule(shard=st.sampled_from(SHARDS), gap=st.integers(1, 3), old=st.booleans())
    def send_what_must_not_be_stored(self, shard: int, gap: int, *, old: bool) -> None:
        """Send a batch after a gap, or of a previous writer."""
        writer = self.writers[shard]
        first, epoch = (writer.end, writer.epoch - 1) if old else (writer.end + gap, writer.epoch)
        stray = Sent(shard, first, epoch, 2)
        frames = len(self.machine.frames)
        self.hear(self.machine.tell(AppendBatch(stray.payload)))
        assert len(self.machine.frames) == frames

    @rule(shard=st.sampled_from(SHARDS), choice=st.integers(0, 9))
    def take_over(self, shard: int, choice: int) -> None:
        """Let a new writer open the shard at any batch end from the ordered position on."""
        self.confirm()
        writer = self.writers[shard]
        writer.epoch += 1
        engine, epoch = ShardId(shard), Epoch(writer.epoch)
        (claimed,) = messages(self.machine.tell(ShardClaim(engine, epoch)))
        assert isinstance(claimed, ShardClaimed)
        assert claimed.stored >= writer.ordered
        starts = writer.ends(claimed.stored)
        start = starts[choice % len(starts)]
        sent = self.machine.tell(ShardOpen(engine, epoch, start))
        assert ShardOpened(engine, epoch, start) in messages(sent)
        writer.batches = [b for b in writer.batches if b.end <= start]
        self.hear(sent)

    # --- the disk

    @rule()
    def hold(self) -> None:
        """Let the disk confirm nothing until the next `confirm`."""
        self.machine.holding = True

    @rule()
    def confirm(self) -> None:
        """Let the disk confirm everything."""
        self.machine.holding = False
        held, self.machine.held = self.machine.held, []
        # All frames are confirmed before the next message, which may rely on them.
        self.hear(self.machine.turn(*held))

    @rule()
    def take_checkpoint(self) -> None:
        """Take a checkpoint between two iterations, when all written frames were confirmed."""
        self.confirm()
        self.machine.take_checkpoint()

    @rule(loss=st.integers(0, 20))
    def crash(self, loss: int) -> None:
        """Lose some unconfirmed or derivable frames, and restart."""
        machine = self.machine
        held = {getattr(event, "location", None) for event in machine.held}
        durable = [
            index
            for index, (kind, _, location) in enumerate(machine.frames)
            if kind is not FrameKind.ORDERING and location not in held
        ]
        keep = max(max(durable, default=-1) + 1, len(machine.frames) - loss)
        del machine.frames[keep:]
        self.reading.clear()
        self.machine = machine.restarted()
        self.hear(self.machine.started)

    # --- order

    @rule(cuts=st.lists(st.integers(0, 9), min_size=2, max_size=2))
    def order(self, cuts: list[int]) -> None:
        """Let the primary order some of the reported records."""
        counts = {}
        tail = len(self.truth)
        for shard, cut in zip(SHARDS, cuts, strict=True):
            writer = self.writers[shard]
            ends = writer.ends(writer.reported)
            end = ends[cut % len(ends)]
            if end > writer.ordered:
                counts[shard] = end - writer.ordered
            for localid in range(writer.ordered, end):
                (sent,) = [b for b in writer.batches if b.first <= localid < b.end]
                self.truth[tail] = (shard, *sent.record(localid))
                tail += 1
            writer.ordered = end
        self.metalog.append(entry(len(self.metalog), counts))

    @rule(start=st.integers(0, 5), count=st.integers(1, 5), late=st.booleans())
    @precondition(lambda self: self.metalog)
    def deliver(self, start: int, count: int, *, late: bool) -> None:
        """Deliver some entries: repeated, early or in order."""
        first = max(0, self.machine.node.position - start) + (count if late else 0)
        self.publish(first, first + count)

    def publish(self, start: int, end: int) -> None:
        if entries := self.metalog[start:end]:
            message = entries_message(entries, committed=len(self.metalog))
            self.hear(self.machine.tell(message, sender=PRIMARY))

    @rule(seconds=st.sampled_from([0.1, 1.0]))
    def wait(self, seconds: float) -> None:
        """Advance the time."""
        self.hear(self.machine.wait(seconds))

    # --- reads

    @rule(shard=st.sampled_from(SHARDS), chosen=st.sets(st.integers(0, 40), min_size=1))
    @precondition(lambda self: self.truth)
    def read(self, shard: int, chosen: set[int]) -> None:
        """Read seqnums of any shard, whether the node has applied their entries or not."""
        self.requests += 1
        seqnums = tuple(sorted({number % len(self.truth) for number in chosen}))
        self.reading[self.requests] = seqnums
        wanted = ReadRecords(self.requests, ENGINE, ShardId(shard), seqnums)
        self.hear(self.machine.tell(wanted, sender=INDEX))

    def teardown(self) -> None:
        """Finally, check that every ordered record is there, with its tags."""
        if not hasattr(self, "machine"):
            return
        self.confirm()
        self.publish(self.machine.node.position, len(self.metalog))
        assert self.machine.node.position == len(self.metalog)
        assert not self.reading
        self.machine.now = Instant(self.machine.now + 1)
        self.read_everything()
        self.fetch_index_data()

    def read_everything(self) -> None:
        for seqnum, (shard, data, _) in self.truth.items():
            wanted = ReadRecords(0, ENGINE, ShardId(shard), (seqnum,))
            (answer,) = messages(self.machine.tell(wanted), ENGINE)
            assert isinstance(answer, RecordsRead)
            assert [(r.seqnum, r.data) for r in answer.records] == [(seqnum, data)]

    def fetch_index_data(self) -> None:
        position = covered = 0
        while position < len(self.metalog):
            wanted = IndexDataWanted(position, 1 << 62, 1)
            (answer,) = messages(self.machine.tell(wanted, sender=INDEX), INDEX)
            assert isinstance(answer, IndexData)
            assert [b.position for b in answer.blocks] == list(
                range(position, position + len(answer.blocks))
            )
            for block in answer.blocks:
                self.check_block(block)
                covered += sum(part.count for part in block.parts)
            position += len(answer.blocks)
        assert covered == len(self.truth)


TestStorageOfTwoShards = StorageOfTwoShards.TestCase
