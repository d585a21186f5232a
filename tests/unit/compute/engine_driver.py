"""Drives one engine by calls; the test plays the receivers of its messages."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from indilog.base.ids import (
    Epoch,
    Instant,
    NodeId,
    ShardId,
    TagColumns,
    ViewNumber,
    pack_tags,
    tag_columns,
)
from indilog.config import Config, node_config
from indilog.kernel.metalog import NewRecords
from indilog.kernel.view import view_of
from indilog.roles.role import Answer, Effect, Received, Send, Started
from indilog.wire.messages import (
    Direction,
    IndexBlock,
    IndexData,
    Message,
    ShardTags,
    StoredRecord,
    TailIs,
)
from indilog_compute.engine import Engine
from tests.support.metalog_messages import entries_message

ENGINE, PRIMARY = NodeId("engine-0"), NodeId("sequencer-0")
A, B = NodeId("storage-0"), NodeId("storage-1")
SHARD = ShardId(0)
JOIN = 1 << 32
"""The first request number of epoch 1."""
TAG, LOG = 77, 11
NAMES = tag_columns("orders", ("x",)).names


def carrying(*tags: int) -> TagColumns:
    """Return the columns of a record with these hashes."""
    return TagColumns(pack_tags(*tags), NAMES)


class Driver:
    """Drives one engine and keeps the messages that it sends."""

    def __init__(self, *, join_at: tuple[int, int] = (0, 0), **settings: float) -> None:
        node = node_config(**settings)
        view = view_of(storage_nodes=2, replicas=2, index_shards=2)
        self.engine = Engine(ENGINE, [view], Config(node=node))
        self.now = 0.0
        self.position, self.tail = join_at
        self.turn(Started(Epoch(1)))

    def join(self) -> None:
        cut = {SHARD: self.tail}
        last = Epoch(1) if self.position else Epoch(0)
        writers = {SHARD: Epoch(1)}
        self.hear(PRIMARY, TailIs(JOIN, self.position, self.tail, cut, last, writers=writers))
        assert self.engine.ready

    def turn(self, *events: Started | Received) -> list[Effect]:
        effects = self.engine.handle(events, Instant(self.now))
        self.engine.check_invariants()
        return effects

    def hear(self, sender: NodeId, *messages: Message) -> list[Effect]:
        return self.turn(*(Received(sender, message, Epoch(1)) for message in messages))

    def order(self, count: int, *, index_data: bool = True) -> list[Effect]:
        """One metalog entry over `count` records of our shard; all carry TAG."""
        position, first = self.position, self.tail
        self.position += 1
        self.tail += count
        entry = NewRecords(position, ViewNumber(1), Epoch(1), {SHARD: count})
        effects = self.hear(PRIMARY, entries_message((entry,)))
        if index_data:
            block = self.block(position, first, count)
            effects += self.hear(A, IndexData((block,), copy_of=block.epoch))
        return effects

    @staticmethod
    def block(position: int, first: int, count: int) -> IndexBlock:
        tags = array("Q", [LOG, TAG] * count).tobytes()
        part = ShardTags(SHARD, first, count, b"\x02" * count, tags)
        return IndexBlock(
            position, first + count, (SHARD,), (part,), Epoch(1), Epoch(min(position, 1))
        )

    def read(self, bound: int, *, position: int = 0, tag: int = TAG) -> object:
        return self.engine.read(Direction.NEXT, tag, bound, position, "reader")


def joined(*, join_at: tuple[int, int] = (0, 0), **settings: float) -> Driver:
    driver = Driver(join_at=join_at, **settings)
    driver.join()
    return driver


def sends(effects: Sequence[Effect], kind: type[Message]) -> list[tuple[NodeId, Message]]:
    return [(e.to, e.message) for e in effects if isinstance(e, Send) and type(e.message) is kind]


def answers(effects: Sequence[Effect]) -> list[object]:
    return [e.outcome for e in effects if isinstance(e, Answer)]


def stored(seqnum: int, data: bytes = b"d") -> StoredRecord:
    return StoredRecord(seqnum, 5_000_000, 6_000_000, NAMES, data, None)


def answered(effects: Sequence[Effect]) -> dict[object, object]:
    """Return the outcome of each waiter that was answered."""
    return {e.waiter: e.outcome for e in effects if isinstance(e, Answer)}
