"""One shard as one replica keeps it: who may write, which batches are where, which seqnums they got
(ARCHITECTURE 3, 8 and thesis 5.5.1).

Three prefixes of localids, each at most as long as the one before it as long as no disk was lost:
`written` (accepted and handed to the journal), `stored` (durable), `ordered` (given seqnums by the
metalog). A replica whose disk was lost has less stored than is ordered; what it lacks it does not
know, which never means that it is not there.

Everything is in flat arrays: 28 bytes a batch and 16 bytes a span of the metalog.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from typing import Final

import msgspec

from indilog.errors import MalformedFrameError
from indilog.ids import Epoch, LocalId, SeqNum, ShardId
from indilog.metalog import Span
from indilog.records import RecordBatch
from indilog.roles import Location

NEVER: Final = Epoch(-1)
"""The epoch of a shard that no writer has claimed or opened here."""


class ShardState(msgspec.Struct, frozen=True, array_like=True):
    """What a frame of kind `SHARD_STATE` holds: a claim (`start` None), or where a writer opened.

    Frames are replayed in order, so what an opening dropped stays dropped.
    """

    shard: ShardId
    epoch: Epoch
    start: LocalId | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ShardState)


def state_encoded(state: ShardState) -> bytes:
    """Return the bytes of a state, as journals hold them."""
    return _encoder.encode(state)


def state_decoded(payload: bytes) -> ShardState:
    """Return the state in `payload`.

    Raises:
        MalformedFrameError: it holds none.
    """
    try:
        return _decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise MalformedFrameError(f"not a shard's state: {error}") from error


class Shard:
    """See the module; methods that change it are called in the order of the journal.

    Attributes:
        claimed: the newest writer; older ones are refused.
        opened: the writer under which the shard was opened last.
        leading: whether this replica is the first one, which sends index data unasked.
        changing: how many states are on their way to the disk.
        written, stored, ordered: prefix lengths, see the module.
        bytes: of all stored batches.
        unordered: batches that no entry has ordered yet, for their tags; may lack old ones.
    """

    __slots__ = (
        "_firsts", "_lengths", "_offsets", "_segments", "_span_localids", "_span_seqnums",
        "bytes", "changing", "claimed", "id", "leading", "opened", "ordered", "stored",
        "unordered", "written",
    )  # fmt: skip

    def __init__(self, shard: ShardId, *, leading: bool) -> None:
        self.id = shard
        self.leading = leading
        self.claimed = self.opened = NEVER
        self.changing = 0
        self.written: LocalId = 0
        self.stored: LocalId = 0
        self.ordered: LocalId = 0
        self.bytes = 0
        self.unordered: deque[RecordBatch] = deque()
        self._firsts = array("Q")
        self._segments = array("I")
        self._offsets = array("Q")
        self._lengths = array("Q")
        self._span_seqnums = array("Q")
        self._span_localids = array("Q")

    @property
    def open(self) -> bool:
        """Whether the writer that claimed the shard last may append."""
        return self.opened == self.claimed != NEVER

    # --- writers

    def can_open_at(self, start: LocalId) -> bool:
        """Tell whether dropping all from `start` on keeps what is ordered and splits no batch."""
        return self.ordered <= start <= self.stored and (
            start == self.stored or self._batch_starts_at(start)
        )

    def _batch_starts_at(self, localid: LocalId) -> bool:
        index = bisect_left(self._firsts, localid)
        return index < len(self._firsts) and self._firsts[index] == localid

    def apply(self, state: ShardState) -> None:
        """Take over a claim, or open the shard: what is stored from `start` on is dropped."""
        if state.start is None:
            self.claimed = state.epoch
            return
        self.opened = state.epoch
        keep = bisect_left(self._firsts, state.start)
        self.bytes -= sum(self._lengths[keep:])
        for column in (self._firsts, self._segments, self._offsets, self._lengths):
            del column[keep:]
        while self.unordered and self.unordered[-1].header.first >= state.start:
            self.unordered.pop()
        self.stored = self.written = state.start

    # --- batches

    def store(self, first: LocalId, end: LocalId, location: Location) -> None:
        """Note where a batch is, which is durable now and follows on."""
        assert first == self.stored, "batches are stored in order, without gaps"
        self._firsts.append(first)
        self._segments.append(location.segment)
        self._offsets.append(location.offset)
        self._lengths.append(location.length)
        self.bytes += location.length
        self.stored = end
        self.written = max(self.written, end)

    def location_of(self, localid: LocalId) -> Location | None:
        """Return where the batch with `localid` is; None: it is not stored here."""
        if not 0 <= localid < self.stored:
            return None
        index = bisect_right(self._firsts, localid) - 1
        return Location(self._segments[index], self._offsets[index], self._lengths[index])

    def locations(self, first: LocalId, end: LocalId) -> list[Location]:
        """Return where the batches are that hold the stored ones of [first, end), in order."""
        if first >= min(end, self.stored):
            return []
        start = bisect_right(self._firsts, first) - 1
        stop = bisect_left(self._firsts, end)
        return [
            Location(*place)
            for place in zip(
                self._segments[start:stop],
                self._offsets[start:stop],
                self._lengths[start:stop],
                strict=True,
            )
        ]

    # --- order

    def order(self, span: Span) -> list[RecordBatch]:
        """Take in what an entry ordered; return the batches of it that are still in memory."""
        self._span_seqnums.append(span.first_seqnum)
        self._span_localids.append(span.first_localid)
        self.ordered = end = span.first_localid + span.length
        batches: list[RecordBatch] = []
        while self.unordered and self.unordered[0].header.first < end:
            batches.append(self.unordered.popleft())
        return batches

    def localid_of(self, seqnum: SeqNum) -> LocalId | None:
        """Return which record of this shard has `seqnum`; None: none, as far as is applied here."""
        index = bisect_right(self._span_seqnums, seqnum) - 1
        if index < 0:
            return None
        localid = self._span_localids[index] + seqnum - self._span_seqnums[index]
        following = index + 1
        end = (
            self._span_localids[following] if following < len(self._span_localids) else self.ordered
        )
        return localid if localid < end else None

    def check_invariants(self) -> None:
        """Assert cheap local facts."""
        assert self.stored <= self.written
        assert self.opened <= self.claimed
        assert len(self._firsts) == len(self._segments) == len(self._offsets) == len(self._lengths)
        assert len(self._span_seqnums) == len(self._span_localids)
        assert not self._firsts or self._firsts[-1] < self.stored
        assert not self._span_localids or self._span_localids[-1] < self.ordered
