"""The record cache of a compute node: the records that it appended or read last (thesis 5.4.2).

Two parts share one budget of bytes. *Own appends* are kept in spans, one span for each batch. The
oldest span is evicted first, and as a whole, so that caching an append takes almost no time.
*Records read* from storage are kept one by one; the least recently used record is evicted first.
Each part may use the bytes that the other part leaves. When the budget is exceeded, own appends are
evicted if they use more than half of it; otherwise records read are evicted.

Aux data has its own budget, so aux data and records are evicted separately. A record is always
returned with the aux data that was set last here. `Engine` adds own appends, and `Reads` adds
records read; both look up records.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from indilog.base.ids import SeqNum
from indilog.base.log import Record
from indilog.wire.messages import StoredRecord

SPAN_RECORD_BYTES: Final = 64
"""Bytes that an own append costs besides its contents: a header of `bytes` and two list slots."""
READ_RECORD_BYTES: Final = 320
"""Bytes that a record from storage costs besides its contents: the object, its fields, and a slot
of a mapping.
"""
AUX_BYTES: Final = 192
"""Bytes that aux data costs besides its contents."""
_DEAD_MAX: Final = 256


class _Span(NamedTuple):
    """Consecutive own appends: one batch that a metalog entry ordered."""

    datas: Sequence[bytes]
    names: Sequence[bytes]
    time: float
    ordered_at: float
    size_bytes: int


_EVICTED: Final = _Span((), (), 0.0, 0.0, 0)


class RecordCache:
    """Caches at most `bytes_max` bytes of records, and at most `aux_bytes_max` bytes of aux data.

    Records are immutable, so a cached record is never outdated. A record that is not cached may
    exist.

    Attributes:
        hits: number of lookups by `get` that found a record.
        misses: number of lookups by `get` that found none.
    """

    __slots__ = (
        "_aux", "_aux_bytes", "_aux_bytes_max", "_bytes_max", "_firsts", "_read", "_read_bytes",
        "_span_bytes", "_span_records", "_spans", "_start", "hits", "misses",
    )  # fmt: skip

    def __init__(self, bytes_max: int, aux_bytes_max: int = 0) -> None:
        self._bytes_max = bytes_max
        self._aux_bytes_max = aux_bytes_max
        self._firsts: list[SeqNum] = []
        """The first seqnum of each span, ascending; spans before the index `_start` are evicted."""
        self._spans: list[_Span] = []
        self._start = 0
        self._span_bytes = 0
        self._span_records = 0
        self._read: OrderedDict[SeqNum, Record] = OrderedDict()
        self._read_bytes = 0
        self._aux: OrderedDict[SeqNum, bytes] = OrderedDict()
        self._aux_bytes = 0
        self.hits = self.misses = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of both parts, including overhead."""
        return self._span_bytes + self._read_bytes

    def add_span(
        self,
        first_seqnum: SeqNum,
        datas: Sequence[bytes],
        names: Sequence[bytes],
        time: float,
        ordered_at: float,
        size_bytes: int,
    ) -> None:
        """Keep own appends that were ordered from `first_seqnum` on. Each call has a greater
        `first_seqnum` than the call before.

        The sequences are kept without a copy, so the caller must not change them afterwards.

        Args:
            first_seqnum: seqnum of the first record.
            datas: the data of each record.
            names: the names of each record (`indilog.base.ids.tag_columns`).
            time: when the writer accepted the records, seconds since 1970 (`Record.time`).
            ordered_at: the stamp of the entry that ordered the records, seconds since 1970.
            size_bytes: the size of the batch in bytes, without `SPAN_RECORD_BYTES`.
        """
        assert not self._firsts or first_seqnum >= self._end(), "own appends ascend"
        size_bytes += SPAN_RECORD_BYTES * len(datas)
        if size_bytes > self._bytes_max:
            return
        self._firsts.append(first_seqnum)
        self._spans.append(_Span(datas, names, time, ordered_at, size_bytes))
        self._span_bytes += size_bytes
        self._span_records += len(datas)
        if self._span_bytes + self._read_bytes > self._bytes_max:
            self._evict()

    def add(self, record: Record) -> None:
        """Keep a record from storage. Its aux data is kept unless aux data was set here already."""
        seqnum = record.seqnum
        if record.aux is not None:
            if seqnum not in self._aux:
                self.set_aux(seqnum, record.aux)
            record = _with_aux(record, None)
        size_bytes = _read_size(record)
        if size_bytes > self._bytes_max or seqnum in self._read:
            return
        self._read[seqnum] = record
        self._read_bytes += size_bytes
        if self._span_bytes + self._read_bytes > self._bytes_max:
            self._evict()

    def take_in(self, stored: StoredRecord) -> Record:
        """Keep a record from storage; return it with the newest aux data known here."""
        if (aux := self.aux_of(stored.seqnum)) is None:
            aux = stored.aux
        record = Record(
            stored.seqnum,
            stored.names,
            stored.data,
            stored.time_us / 1e6,
            stored.ordered_us / 1e6,
            aux,
        )
        self.add(record)
        return record

    def get(self, seqnum: SeqNum) -> Record | None:
        """Return the record at `seqnum` with its aux data; None: the record is not cached."""
        index = bisect_right(self._firsts, seqnum, self._start) - 1
        if index >= self._start:
            span = self._spans[index]
            offset = seqnum - self._firsts[index]
            if offset < len(span.datas):
                self.hits += 1
                names, data = span.names[offset], span.datas[offset]
                aux = self.aux_of(seqnum)
                return Record(seqnum, names, data, span.time, span.ordered_at, aux)
        record = self._read.get(seqnum)
        if record is None:
            self.misses += 1
            return None
        self.hits += 1
        self._read.move_to_end(seqnum)
        aux = self.aux_of(seqnum)
        if aux is None:
            return record
        return _with_aux(record, aux)

    def holds(self, seqnum: SeqNum) -> bool:
        """Whether `get` would find `seqnum`; this call counts as neither hit nor miss."""
        index = bisect_right(self._firsts, seqnum, self._start) - 1
        if index >= self._start and seqnum - self._firsts[index] < len(self._spans[index].datas):
            return True
        return seqnum in self._read

    def set_aux(self, seqnum: SeqNum, aux: bytes) -> None:
        """Keep `aux` as the aux data of the record at `seqnum`; replace earlier aux data."""
        replaced = self._aux.pop(seqnum, None)
        if replaced is not None:
            self._aux_bytes -= AUX_BYTES + len(replaced)
        if AUX_BYTES + len(aux) > self._aux_bytes_max:
            return
        self._aux[seqnum] = aux
        self._aux_bytes += AUX_BYTES + len(aux)
        while self._aux_bytes > self._aux_bytes_max:
            _, evicted = self._aux.popitem(last=False)
            self._aux_bytes -= AUX_BYTES + len(evicted)

    def status(self) -> dict[str, int]:
        """Return numbers of records, bytes, hits and misses, for operators and metrics."""
        return {
            "entries": self._span_records + len(self._read), "bytes": self.size_bytes,
            "aux_entries": len(self._aux), "aux_bytes": self._aux_bytes,
            "hits": self.hits, "misses": self.misses,
        }  # fmt: skip

    def _end(self) -> SeqNum:
        """Return the seqnum after that of the newest own append."""
        return self._firsts[-1] + len(self._spans[-1].datas)

    def aux_of(self, seqnum: SeqNum) -> bytes | None:
        """Return the aux data kept for `seqnum`, whether or not its record is cached."""
        if not self._aux:
            return None
        aux = self._aux.get(seqnum)
        if aux is not None:
            self._aux.move_to_end(seqnum)
        return aux

    def _evict(self) -> None:
        """Evict until the limit holds: own appends while they use more than half of the budget,
        otherwise records read.
        """
        while self._span_bytes + self._read_bytes > self._bytes_max:
            if self._span_bytes * 2 > self._bytes_max:
                self._span_bytes -= self._spans[self._start].size_bytes
                self._span_records -= len(self._spans[self._start].datas)
                self._spans[self._start] = _EVICTED
                self._start += 1
            else:
                _, record = self._read.popitem(last=False)
                self._read_bytes -= _read_size(record)
        if self._start > _DEAD_MAX and self._start * 2 > len(self._spans):
            del self._spans[: self._start], self._firsts[: self._start]
            self._start = 0

    def check_invariants(self) -> None:
        """Assert the bounds, and that the counters are right."""
        spans = self._spans[self._start :]
        assert self._span_bytes == sum(span.size_bytes for span in spans), "spans are counted"
        assert self._read_bytes == sum(map(_read_size, self._read.values())), "reads are counted"
        assert self.size_bytes <= self._bytes_max, "more bytes of records than allowed"
        aux_bytes = sum(AUX_BYTES + len(aux) for aux in self._aux.values())
        assert self._aux_bytes == aux_bytes <= self._aux_bytes_max, "aux data is counted, bounded"
        assert len(self._firsts) == len(self._spans), "a span has a first seqnum"
        assert self._firsts == sorted(self._firsts), "spans ascend"


def _with_aux(record: Record, aux: bytes | None) -> Record:
    return Record(record.seqnum, record.names, record.data, record.time, record.ordered_at, aux)


def _read_size(record: Record) -> int:
    return READ_RECORD_BYTES + len(record.data) + len(record.names)
