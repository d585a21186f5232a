"""Type-S index data: the tags of ordered records, as columns (thesis 4.1, ARCHITECTURE 8.5).

`StorageNode` sends this data to index nodes and engines. Tags are not interpreted here. Every cut
lies between batches, so the tags of a span are the concatenated tag columns of its batches. No
sequencer orders a span that begins or ends inside a batch, but an incorrect message may name such a
span. So the columns of the first and the last batch are sliced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

import msgspec

from indilog.base.ids import Epoch, LocalId, MetalogPosition, NodeId, ShardId
from indilog.kernel.index_schedule import last_below, previous_of
from indilog.kernel.lost_ranges import LostRange
from indilog.kernel.metalog import Span
from indilog.kernel.records import RecordBatch
from indilog.kernel.view import View
from indilog.roles.role import Effect, Location, Send
from indilog.wire.messages import IndexBlock, IndexData, ShardTags
from indilog_storage.batch_reads import BatchTask
from indilog_storage.ordering import Ordering
from indilog_storage.shard import Shard

_BLOCKS_MAX: Final = 1024
"""Largest number of positions in one answer."""
_COLUMNS_BYTES_MAX: Final = 1024 * 1024
"""Largest number of bytes of columns in one answer; a single position may exceed it."""


class Columns(NamedTuple):
    """The tag columns of one batch: counts (u8 for each record) and tags (u64 for each tag).
    `lost`: whether the records are lost.
    """

    shard: ShardId
    first: LocalId
    counts: bytes
    tags: bytes
    lost: bool = False


def columns_of(batch: RecordBatch) -> Columns:
    """Return the tag columns of a batch."""
    return Columns(batch.header.shard, batch.header.first, *batch.tag_columns())


def part_of(span: Span, batches: Iterable[Columns]) -> ShardTags | None:
    """Return the tags of `span` from the columns of its batches; None: some batches are missing."""
    counts: list[bytes] = []
    tags: list[bytes] = []
    lost: list[LostRange] = []
    following, end = span.first_localid, span.first_localid + span.length
    for columns in batches:
        batch_end = columns.first + len(columns.counts)
        if columns.shard != span.shard or not columns.first <= following < batch_end:
            return None
        whole = following == columns.first and batch_end <= end
        taken = columns if whole else _sliced(columns, following, min(batch_end, end))
        counts.append(taken.counts)
        tags.append(taken.tags)
        if taken.lost:
            seqnum = span.first_seqnum + following - span.first_localid
            lost.append(LostRange(seqnum, seqnum + len(taken.counts)))
        following += len(taken.counts)
    if following != end:
        return None
    return ShardTags(
        span.shard, span.first_seqnum, span.length, b"".join(counts), b"".join(tags), tuple(lost)
    )


def _sliced(columns: Columns, first: LocalId, end: LocalId) -> Columns:
    start = first - columns.first
    counts = columns.counts[start : end - columns.first]
    skipped = sum(columns.counts[:start])
    tags = columns.tags[8 * skipped : 8 * (skipped + sum(counts))]
    return Columns(columns.shard, first, counts, tags, columns.lost)


def index_block(
    view: View,
    position: MetalogPosition,
    ordering: Ordering,
    spans: Sequence[Span],
    parts: Sequence[ShardTags | None],
) -> IndexBlock:
    """Return the block of an applied position, with the parts of the shards that are kept here."""
    return IndexBlock(
        position,
        ordering.tail_at(position),
        tuple(span.shard for span in spans),
        tuple(part for part in parts if part is not None),
        ordering.epoch_at(position),
        ordering.epoch_at(previous_of(view.eras, position)),
    )


def announce_incarnation(view: View, ordering: Ordering) -> list[Effect]:
    """Send each index shard its last applied position again, without tags.

    The caller does this after it has applied an entry of a new incarnation of the primary. Each
    index shard then confirms its entries of earlier incarnations, or replaces them.
    """
    effects: list[Effect] = []
    for index_shard, replicas in enumerate(view.index_shards):
        position = last_below(view.eras, index_shard, ordering.position)
        if position >= 0:
            block = index_block(view, position, ordering, ordering.spans_at(position), ())
            data = IndexData((block,), ordering.last)
            effects += [Send(replica, data, urgent=False) for replica in replicas]
    return effects


def distribute(view: View, blocks: Sequence[IndexBlock], last: Epoch) -> list[Effect]:
    """Return unrequested messages: each block to its index shard, and all blocks to every engine.

    `last` is the primary's incarnation that proposed the last applied entry.
    """
    effects: list[Effect] = []
    own: dict[int, list[IndexBlock]] = {}
    for block in blocks:
        own.setdefault(view.index_shard_at(block.position), []).append(block)
    for index_shard, of_shard in own.items():
        messages = _messages(of_shard, last)
        replicas = view.index_shards[index_shard]
        effects += [Send(replica, data, urgent=False) for data in messages for replica in replicas]
    messages = _messages(blocks, last)
    effects += [Send(engine, data, urgent=False) for data in messages for engine in view.engines]
    return effects


def _messages(blocks: Sequence[IndexBlock], last: Epoch) -> list[IndexData]:
    """Pack blocks into messages of bounded size; receivers reassemble the parts of a position."""
    if sum(_columns_bytes(block.parts) for block in blocks) <= _COLUMNS_BYTES_MAX:
        return [IndexData(tuple(blocks), last)] if blocks else []
    messages: list[IndexData] = []
    for block in blocks:
        if _columns_bytes(block.parts) <= _COLUMNS_BYTES_MAX:
            messages.append(IndexData((block,), last))
        else:
            apart = (msgspec.structs.replace(block, parts=(part,)) for part in block.parts)
            messages += [IndexData((one,), last) for one in apart]
    return messages


def _columns_bytes(parts: Sequence[ShardTags]) -> int:
    return sum(len(part.tag_counts) + len(part.tags) for part in parts)


class IndexPage(BatchTask):
    """Collects the answer to one `IndexDataWanted`: applied positions, in order.

    If the primary replaces applied entries, the page is dropped without an answer. So all positions
    of an answer belong to one metalog. The page ends early when it is full. It leaves out the parts
    of shards that are not kept here.
    """

    def __init__(
        self,
        to: NodeId,
        positions: range,
        view: View,
        ordering: Ordering,
        shards: Mapping[ShardId, Shard],
    ) -> None:
        self._view = view
        self._ordering = ordering
        self._positions: list[tuple[MetalogPosition, list[Span]]] = []
        self._places: dict[tuple[MetalogPosition, ShardId], list[Location]] = {}
        self._nowhere: dict[tuple[MetalogPosition, ShardId], list[Columns]] = {}
        """Columns of records in no batch: trimmed and lost records."""
        self._taken: dict[Location, Columns | None] = {}
        self._bytes = 0
        wanted: dict[Location, None] = {}
        self._needed_first = 0
        for position in positions[:_BLOCKS_MAX]:
            if self._bytes >= _COLUMNS_BYTES_MAX:
                break
            spans = ordering.spans_at(position)
            self._positions.append((position, spans))
            for span in spans:
                if (shard := shards.get(span.shard)) is not None:
                    end = span.first_localid + span.length
                    places = shard.locations(span.first_localid, end)
                    gone = shard.gone_in(span.first_localid, end)
                    lost = shard.lost_within(span.first_localid, end)
                    if gone or lost:
                        self._nowhere[position, span.shard] = [
                            Columns(span.shard, first, bytes(stop - first), b"", lost=is_lost)
                            for ranges, is_lost in ((gone, False), (lost, True))
                            for first, stop in ranges
                        ]
                        self._bytes += sum(stop - first for first, stop in gone + lost)
                    self._places[position, span.shard] = places
                    wanted.update(dict.fromkeys(places))
            self._needed_first = self._needed_first or len(wanted)
        self._wanted = len(wanted)
        super().__init__(to, wanted)

    @property
    def full(self) -> bool:
        """Whether the answer has enough columns, and at least one position."""
        asked = self._wanted - len(self.todo)
        return self._bytes >= _COLUMNS_BYTES_MAX and asked >= self._needed_first

    def take(self, location: Location, batch: RecordBatch | None) -> None:
        """Copy the tag columns of a batch."""
        columns = columns_of(batch) if batch is not None else None
        self._taken[location] = columns
        self._bytes += len(columns.counts) + len(columns.tags) if columns is not None else 0

    def answer(self) -> IndexData:
        """Return the blocks of the first positions. The answer ends when it is full, or before the
        first position with a batch that was not read.
        """
        blocks: list[IndexBlock] = []
        size = 0
        for position, spans in self._positions:
            places = [self._places.get((position, span.shard), []) for span in spans]
            if any(place not in self._taken for of_span in places for place in of_span):
                break
            parts = [
                self._part(position, span, of_span)
                for span, of_span in zip(spans, places, strict=True)
            ]
            blocks.append(index_block(self._view, position, self._ordering, spans, parts))
            size += _columns_bytes([part for part in parts if part is not None])
            if size >= _COLUMNS_BYTES_MAX:
                break
        return IndexData(tuple(blocks), self._ordering.last)

    def _part(
        self, position: MetalogPosition, span: Span, places: Sequence[Location]
    ) -> ShardTags | None:
        columns = [c for place in places if (c := self._taken[place]) is not None]
        if nowhere := self._nowhere.get((position, span.shard)):
            columns = sorted([*columns, *nowhere], key=attrgetter("first"))
        return part_of(span, columns)
