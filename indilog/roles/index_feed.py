"""Index feeds: engines and index nodes put type-S messages (index data) in order before they apply
them.

Parts of one metalog position may come from several storage nodes, early, late and repeated. A
position is ready when the parts of all its productive shards have arrived and every earlier
position of the feed was taken. The feed of an engine has all positions; the feed of an index shard
has its own (`indilog.kernel.index_schedule`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from indilog.base.ids import Epoch, MetalogPosition, SeqNum, ShardId
from indilog.kernel.index_schedule import EVERY_POSITION, IndexPositions
from indilog.kernel.metalog import NO_INCARNATION
from indilog.wire.messages import IndexBlock, ShardTags

_OVERHEAD_BYTES: Final = 512
"""Bytes that a position and its parts take besides their columns; an estimate."""


class ReadyBlock:
    """All index data of one position; `parts` ascend by shard and so by seqnum.

    Attributes:
        epoch, previous: as in `IndexBlock`.
        copy_of: the newest incarnation of the primary whose metalog, according to the senders, has
            the entry at this position.
    """

    __slots__ = ("copy_of", "epoch", "parts", "position", "previous", "tail")

    def __init__(
        self,
        position: MetalogPosition,
        tail: SeqNum,
        parts: list[ShardTags],
        epochs: tuple[Epoch, Epoch] = (NO_INCARNATION, NO_INCARNATION),
        copy_of: Epoch = NO_INCARNATION,
    ) -> None:
        self.position = position
        self.tail = tail
        self.parts = parts
        self.previous, self.epoch = epochs
        self.copy_of = copy_of


class _Gathering:
    """A position with some of its data; it is incomplete, or waits for an earlier position."""

    __slots__ = ("copy_of", "epoch", "missing", "parts", "previous", "size_bytes", "tail")

    def __init__(self, block: IndexBlock) -> None:
        self.tail = block.tail
        self.epoch, self.previous = block.epoch, block.previous
        self.copy_of = NO_INCARNATION
        self.size_bytes = _OVERHEAD_BYTES
        self.missing = set(block.productive)
        self.parts: dict[ShardId, ShardTags] = {}

    def add(self, parts: Iterable[ShardTags]) -> None:
        for part in parts:
            if part.shard in self.missing:
                self.missing.discard(part.shard)
                self.parts[part.shard] = part
                self.size_bytes += len(part.tag_counts) + len(part.tags)

    def ready(self, position: MetalogPosition) -> ReadyBlock:
        parts = [self.parts[s] for s in sorted(self.parts)]
        return ReadyBlock(position, self.tail, parts, (self.previous, self.epoch), self.copy_of)


class IndexFeed:
    """The data of the metalog positions `positions`, from `position` on, in order.

    Buffers at most `positions_max` positions that are not ready. Their data may have at most
    `bytes_max` bytes, not counting the next position. Beyond these limits the feed drops the latest
    positions, and its owner requests them again.
    """

    def __init__(
        self,
        position: MetalogPosition,
        *,
        positions: IndexPositions = EVERY_POSITION,
        positions_max: int,
        bytes_max: int,
    ) -> None:
        self.position = positions.first_from(position)
        self._positions = positions
        self._positions_max = positions_max
        self._bytes_max = bytes_max
        self._held_bytes = 0
        self._gathering: dict[MetalogPosition, _Gathering] = {}

    def set_positions(self, positions: IndexPositions, start: MetalogPosition) -> None:
        """Use other positions from `start` on; none at or above `start` was taken yet."""
        self._positions = positions
        self.position = positions.first_from(min(self.position, start))
        for position in [held for held in self._gathering if held not in positions]:
            self._held_bytes -= self._gathering.pop(position).size_bytes

    @property
    def behind(self) -> bool:
        """Whether data of a later position is here while the next one is incomplete."""
        return bool(self._gathering)

    @property
    def end(self) -> MetalogPosition:
        """The position after the latest one with data here."""
        return max(self._gathering, default=self.position - 1) + 1

    @property
    def horizon(self) -> MetalogPosition:
        """The first position that is too far ahead to be buffered."""
        return self._positions.after(self.position, self._positions_max)

    def put(self, blocks: Iterable[IndexBlock], copy_of: Epoch = NO_INCARNATION) -> None:
        """Add blocks; positions that were taken already or are not of this feed are skipped.

        If blocks of one position belong to different entries, the entry of the newer incarnation
        has replaced the other one, and its block counts. `copy_of` is that of the message
        (`IndexData`).
        """
        horizon = self.horizon
        for block in blocks:
            position = block.position
            if position < self.position or position >= horizon:
                continue
            if position not in self._positions:
                continue
            gathering = self._gathering.get(position)
            if gathering is not None and gathering.epoch < block.epoch:
                self._held_bytes -= gathering.size_bytes
                gathering = None
            if gathering is None:
                gathering = self._gathering[position] = _Gathering(block)
                self._held_bytes += _OVERHEAD_BYTES
            if block.epoch < gathering.epoch:
                continue
            before = gathering.size_bytes
            gathering.copy_of = max(gathering.copy_of, copy_of)
            gathering.add(block.parts)
            self._held_bytes += gathering.size_bytes - before
        if self._held_bytes > self._bytes_max:
            self._shed()

    def take(self, end: MetalogPosition = 1 << 62) -> Iterator[ReadyBlock]:
        """Yield the positions below `end` that are ready, in order.

        A position counts as taken when it is yielded, so apply it before asking for the next.
        """
        while self.position < end:
            gathering = self._gathering.get(self.position)
            if gathering is None or gathering.missing:
                return
            del self._gathering[self.position]
            self._held_bytes -= gathering.size_bytes
            block = gathering.ready(self.position)
            self.position = self._positions.first_from(self.position + 1)
            yield block

    def reject(self, block: ReadyBlock) -> None:
        """Undo `take` of a block with impossible data: its position is missing again."""
        self.position = block.position

    def _shed(self) -> None:
        """Drop the latest positions until half of the allowed bytes are left, so that this happens
        rarely. The next position is never dropped.
        """
        for position in sorted(self._gathering, reverse=True):
            if self._held_bytes <= self._bytes_max // 2 or position == self.position:
                return
            self._held_bytes -= self._gathering.pop(position).size_bytes
