"""A storage node under any order, loss, repetition and restart, against a dictionary.

The model holds the batches that a writer sent, the order (seqnum → record), and the frames that the
disk confirmed. It uses only the messages of the node, never its internal state.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from indilog.base.ids import Instant, ShardId
from indilog.config import Config, node_config
from indilog.kernel.metalog import Entry, NewWriters
from indilog.kernel.view import view_of
from indilog.roles.role import FrameKind, Send
from indilog.wire.messages import (
    AppendBatch,
    IndexBlock,
    IndexData,
    IndexDataWanted,
    ReadRecords,
    RecordsRead,
    ShardProgress,
)
from tests.support.metalog_messages import entries_message
from tests.unit.storage.machine import (
    ENGINE,
    INDEX,
    PRIMARY,
    Machine,
    batch,
    entry,
    messages,
    new_writers,
)

SHARDS = (0, 1)


class Sent:
    """A batch that a writer sent."""

    def __init__(self, shard: int, first: int, epoch: int, size: int) -> None:
        self.first = first
        self.epoch = epoch
        self.data = [f"{shard}/{first + n}/{epoch}".encode() * 3 for n in range(size)]
        self.end = first + size
        self.tag = 1000 * epoch + first
        self.payload = batch(first, self.data, shard=shard, epoch=epoch, tags=(self.tag,))

    def record(self, localid: int) -> tuple[bytes, list[int]]:
        """Return data and tags of one record (see `batch`)."""
        index = localid - self.first
        return self.data[index], [self.tag, *range(100, 100 + index)]


class Writer:
    """State of one shard in the model: the epoch of the newest writer that the metalog names, and
    the records sent, ordered and reported.

    Attributes:
        sent: by epoch, the batches of the shard as that writer knows it: those that were ordered
            before it, and its own.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.sent: dict[int, list[Sent]] = {0: []}
        self.ordered = 0
        self.reported = 0

    @property
    def batches(self) -> list[Sent]:
        return self.sent[self.epoch]

    def end(self, epoch: int) -> int:
        return self.sent[epoch][-1].end if self.sent[epoch] else 0

    def ends(self, upto: int) -> list[int]:
        """Positions where a cut may be: batch ends from the ordered position on."""
        return [self.ordered] + [b.end for b in self.batches if self.ordered < b.end <= upto]

    def take_over(self) -> int:
        """Begin with a new writer after what is ordered; return its epoch."""
        kept = [b for b in self.batches if b.end <= self.ordered]
        self.epoch += 1
        self.sent[self.epoch] = kept
        self.reported = self.ordered
        return self.epoch


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
        self.metalog: list[Entry] = []
        self.truth: dict[int, tuple[int, bytes, list[int]]] = {}
        self.reading: dict[int, tuple[int, ...]] = {}
        self.requests = 0
        for shard in SHARDS:
            self.take_over(shard)
        self.publish(0, len(SHARDS))

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
            assert 1 <= epoch == self.named(shard), "the writer that its entries name"
            assert all(b.payload in confirmed for b in writer.sent[epoch] if b.end <= stored)
            assert stored <= writer.end(epoch)
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

    def named(self, shard: int) -> int:
        """Return the writer that the entries name which the node has applied."""
        applied = self.metalog[: self.machine.node.position]
        named = [entry.writers for entry in applied if isinstance(entry, NewWriters)]
        return max((writers.get(ShardId(shard), 0) for writers in named), default=0)

    def resend(self, shard: int) -> None:
        unordered = [b for b in self.writers[shard].batches if b.end > self.writers[shard].ordered]
        self.hear(self.machine.tell(*[AppendBatch(b.payload) for b in unordered]))

    @rule(shard=st.sampled_from(SHARDS), size=st.integers(1, 4))
    def append(self, shard: int, size: int) -> None:
        """Resend unordered batches, and send a new batch."""
        writer = self.writers[shard]
        writer.batches.append(Sent(shard, writer.end(writer.epoch), writer.epoch, size))
        self.resend(shard)

    @rule(shard=st.sampled_from(SHARDS), size=st.integers(1, 4))
    def append_as_the_writer_before(self, shard: int, size: int) -> None:
        """Let the previous writer continue: it does not know the newest one."""
        writer = self.writers[shard]
        if before := writer.epoch - 1:
            sent = writer.sent[before]
            sent.append(Sent(shard, writer.end(before), before, size))
            own = [b for b in sent if b.epoch == before]
            self.hear(self.machine.tell(*[AppendBatch(b.payload) for b in own]))

    @rule(
        shard=st.sampled_from(SHARDS),
        gap=st.integers(1, 3),
        other=st.sampled_from([None, -1, 1]),
    )
    def send_what_must_not_be_stored(self, shard: int, gap: int, other: int | None) -> None:
        """Send a batch after a gap, or of another writer than the entries name."""
        writer, named = self.writers[shard], self.named(shard)
        if not named:
            return
        if other is None:
            stray = Sent(shard, writer.end(writer.epoch) + 100 + gap, writer.epoch, 2)
        else:
            stray = Sent(shard, writer.ordered, named + other, 2)
        frames = len(self.machine.frames)
        self.hear(self.machine.tell(AppendBatch(stray.payload)))
        assert len(self.machine.frames) == frames

    @rule(shard=st.sampled_from(SHARDS))
    def take_over(self, shard: int) -> None:
        """Let the primary give the shard to a new writer; the node need not know yet."""
        epoch = self.writers[shard].take_over()
        self.metalog.append(new_writers(len(self.metalog), epoch, shard))

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
