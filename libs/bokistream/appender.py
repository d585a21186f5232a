"""Appends records under one fencing token: groups them into batches, and keeps their order.

`Writer` is an `Appender`; `Streams.append` keeps one for each token. Both append by `append_after`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from bokistream import waiting
from bokistream.appending import ATTEMPTS, append_after
from bokistream.chain import Last, NewRecord, read_last
from bokistream.errors import (
    AppendContendedError,
    FencedError,
    MatchFailedError,
    StreamSealedError,
    StreamSettingsError,
    TransactionOrderError,
)
from bokistream.records import DATA, SEAL, checked_txid, records_tag
from indilog import AppendOutcomeUnknownError, Log, OverloadedError, TooLargeError
from indilog.sdk import Event, SeqNum

BATCH_RECORDS: Final = 1_000
"""Largest number of records in a batch of a writer."""
BATCH_BYTES: Final = 1 << 20
"""A batch with so many bytes of data, or more, gets no further record."""
WAITING_MAX: Final = 10_000
"""Largest number of records that wait in a writer."""
WAITING_BYTES_MAX: Final = 64 << 20
"""Largest number of bytes of data that wait in a writer."""


class _Submission:
    """A record of one caller.

    Attributes:
        seqnum: its seqnum, as soon as the record has effect.
        error: why the record has no effect, or why its outcome is unknown.
        first: the first record of the same call; if that one is refused, this one is refused, too.
        count: number of records of the call; only the first record has it.
        before_last_bytes: bytes of these records without the last one; only the first record has
            it.
        over: event that is set with `seqnum` or `error`; only the last record of a call has one.
    """

    __slots__ = (
        "before_last_bytes",
        "count",
        "data",
        "error",
        "first",
        "kind",
        "match_seqnum",
        "over",
        "seqnum",
        "txid",
    )

    def __init__(
        self, data: bytes, txid: int | None, match_seqnum: SeqNum | None, kind: int = DATA
    ) -> None:
        self.kind = kind
        self.data = data
        self.txid = txid
        self.match_seqnum = match_seqnum
        self.seqnum: SeqNum | None = None
        self.error: BaseException | None = None
        self.first: _Submission = self
        self.count = 1
        self.before_last_bytes = 0
        self.over: Event | None = None

    def end(self, seqnum: SeqNum | None, error: BaseException | None = None) -> None:
        """Note the outcome, and wake the caller."""
        self.seqnum, self.error = seqnum, error
        if self.over is not None:
            self.over.set()


class Appender:
    """Appends records under one fencing token.

    Concurrent calls of one appender are appended in the order in which they were called. One batch
    is in flight at a time; calls that come meanwhile form the next batch. So a caller that is alone
    waits for no other, and under load a batch holds many records.

    Args:
        log: log of the stream.
        name: name of the stream.
        created: seqnum of its creation.
        token: fencing token under which records are appended; -1: the stream has had no writer.
    """

    def __init__(self, log: Log, name: str, created: SeqNum, token: SeqNum) -> None:
        self.name = name
        self.log = log
        self.token = token
        self._created = created
        self._tag = records_tag(created)
        self._last: Last | None = None
        """State of the stream after this appender's last batch; None: it must be read."""
        self._next_offset = 0
        self._waiting: deque[_Submission] = deque()
        self._waiting_bytes = 0
        self._is_appending = False
        """Whether a task appends the records that wait."""
        self._batch_records_max = BATCH_RECORDS

    async def append(
        self, data: bytes, *, txid: int | None = None, match_seqnum: SeqNum | None = None
    ) -> SeqNum:
        """Append a record and return its seqnum.

        When this returns, the record is durable, and every reader of the stream gets it. If the
        call raises any other error than `AppendOutcomeUnknownError`, no reader ever gets the
        record.

        Args:
            data: the record, at most the log's `record_bytes_max` less 128 bytes.
            txid: transaction id, 0 to 2**63 - 1, not smaller than that of the last record; None:
                that of the last record (0 in an empty stream).
            match_seqnum: append only if the last record of the stream has this seqnum; -1: only if
                the stream has no record; None: without this condition.

        Raises:
            FencedError: another writer has taken the stream over.
            StreamSealedError: the stream has ended.
            MatchFailedError: the last record is another one.
            TransactionOrderError: `txid` is smaller than that of the last record.
            AppendOutcomeUnknownError: the record may be in the stream.
            OverloadedError: too many appends wait in this writer, or an earlier append failed.
            IndilogError: as for `Log.append`.
        """
        return (await self.append_many([data], txid=txid, match_seqnum=match_seqnum))[0]

    async def append_many(
        self,
        records: Sequence[bytes],
        *,
        txid: int | None = None,
        match_seqnum: SeqNum | None = None,
    ) -> list[SeqNum]:
        """Append records in order and return their seqnums.

        All records have the same transaction id. Up to 1,000 records and about 1 MiB are appended
        atomically. If an error is raised, a longer list may have been appended in part.

        Args:
            records: data of the records.
            txid: as for `append`.
            match_seqnum: as for `append`; the condition is that of the first record.

        Raises:
            IndilogError: as for `append`.
        """
        if txid is not None:
            checked_txid(txid)
        if match_seqnum is not None and (type(match_seqnum) is not int or match_seqnum < -1):
            raise StreamSettingsError(
                f"match_seqnum must be a seqnum, or -1, not {match_seqnum!r:.40}."
            )
        for data in records:
            if not isinstance(data, bytes):
                raise TypeError(f"A record must be bytes, not {type(data).__name__}.")
        if not records:
            return []
        own = [_Submission(data, txid, match_seqnum if n == 0 else None)
               for n, data in enumerate(records)]  # fmt: skip
        return await self._submit(own)

    async def seal(self) -> None:
        """End the stream after the records appended so far: every later append is refused, and
        readers end there.

        Raises:
            IndilogError: as for `append`.
        """
        await self._submit([_Submission(b"", None, None, SEAL)])

    @property
    def next_offset(self) -> int:
        """Offset of the next record, as far as this appender knows."""
        return self._next_offset

    # --- batches

    async def _submit(self, own: list[_Submission]) -> list[SeqNum]:
        size = sum(len(one.data) for one in own)
        if (
            len(self._waiting) + len(own) > WAITING_MAX
            or self._waiting_bytes + size > WAITING_BYTES_MAX
        ):
            raise OverloadedError(
                f"Too many appends to stream {self.name!r} wait (limits: {WAITING_MAX:,} records, "
                f"{WAITING_BYTES_MAX:,} bytes); nothing was appended. Await earlier ones first."
            )
        self._waiting.extend(own)
        self._waiting_bytes += size
        over = own[-1].over = Event()
        for one in own:
            one.first = own[0]
        own[0].count, own[0].before_last_bytes = len(own), size - len(own[-1].data)
        if not self._is_appending:
            self._is_appending = True
            await waiting.begin(self._append_all())
        await over.wait()
        for one in own:
            if one.error is not None:
                raise one.error
        return [one.seqnum for one in own if one.seqnum is not None]

    async def _append_all(self) -> None:
        """Append batch after batch, until no record waits."""
        try:
            while self._waiting:
                await self._append_next()
                await waiting.yield_to_callers()
        finally:
            self._is_appending = False

    async def _append_next(self) -> None:
        """Append one batch of records that wait, and note the outcome of each."""
        batch: list[_Submission] = []
        try:
            await self._append_batch(batch)
        except TooLargeError as error:
            self._retry_in_parts(batch, error)
        except Exception as error:  # noqa: BLE001 - each caller raises it
            self._fail(batch, error)
        except BaseException:
            self._fail(batch, AppendOutcomeUnknownError("The event loop ended during an append."))
            raise

    async def _append_batch(self, batch: list[_Submission]) -> None:
        """Move submissions that wait to `batch`, append them and note their seqnums."""
        for _ in range(ATTEMPTS):
            last, self._last = self._last, None
            if last is None:
                last = await read_last(self.log, self._tag, self.name, fresh=True)
            self.check(last)
            self._return_to_waiting(batch)
            records = self._take(last, batch)
            if not batch:
                self._last = last
                return
            self._last = await append_after(self.log, self._tag, last, records)
            if self._last is not None:
                self._next_offset = self._last.offset
                place = self._last.record - len(batch) + 1
                self._batch_records_max = min(2 * self._batch_records_max, BATCH_RECORDS)
                for index, one in enumerate(batch):
                    one.end(place + index)
                return
        raise AppendContendedError(self.name)

    def check(self, last: Last) -> None:
        """Raise unless this appender may append after `last`.

        Raises:
            StreamSealedError: the stream has ended.
            FencedError: another writer owns the stream.
        """
        if last.is_sealed:
            raise StreamSealedError(self.name)
        if last.token != self.token:
            raise FencedError(self.name, last.token)

    def _take(self, last: Last, batch: list[_Submission]) -> list[NewRecord]:
        """Move the next submissions to `batch`; refuse those that may not come next."""
        records: list[NewRecord] = []
        txid, size = last.txid, 0
        while self._waiting and len(batch) < self._batch_records_max and size < BATCH_BYTES:
            one = self._waiting[0]
            is_alone = one.match_seqnum is not None or one.kind == SEAL
            if batch and (is_alone or batch[-1].kind == SEAL):
                break
            if one.first is one and self._fits(one) and not self._fits(one, len(batch), size):
                break
            self._waiting.popleft()
            self._waiting_bytes -= len(one.data)
            if one.first.error is not None:
                one.end(None, one.first.error)
            elif one.match_seqnum is not None and one.match_seqnum != last.seqnum:
                one.end(None, MatchFailedError(self.name, one.match_seqnum, last.seqnum))
            elif one.txid is not None and one.txid < txid:
                one.end(None, TransactionOrderError(self.name, one.txid, txid))
            else:
                txid = txid if one.txid is None else one.txid
                size += len(one.data)
                batch.append(one)
                records.append(NewRecord(one.kind, txid, one.data))
        return records

    def _fits(self, first: _Submission, count: int = 0, size: int = 0) -> bool:
        """Tell whether all records of a call fit into a batch that has `count` records of `size`
        bytes.
        """
        is_few = count + first.count <= self._batch_records_max
        return is_few and size + first.before_last_bytes < BATCH_BYTES

    def _return_to_waiting(self, batch: list[_Submission]) -> None:
        self._waiting.extendleft(reversed(batch))
        self._waiting_bytes += sum(len(one.data) for one in batch)
        batch.clear()

    def _retry_in_parts(self, batch: list[_Submission], error: TooLargeError) -> None:
        if len(batch) == 1:
            batch[0].end(None, error)
            return
        self._batch_records_max = max(1, len(batch) // 2)
        self._return_to_waiting(batch)

    def _fail(self, batch: list[_Submission], error: BaseException) -> None:
        """Fail a batch, and all later submissions, because they must not overtake the batch."""
        for one in batch:
            one.end(None, error)
        later = error
        if batch and not isinstance(error, FencedError | StreamSealedError):
            later = OverloadedError(
                f"An earlier append to stream {self.name!r} failed, so nothing was appended: "
                f"{error}"
            )
        for one in self._waiting:
            one.end(None, later)
        self._waiting.clear()
        self._waiting_bytes = 0
