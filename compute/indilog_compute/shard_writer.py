"""The append side of a compute node: one shard at a time, one writer (ARCHITECTURE 8, thesis 5.3
and 5.5.1).

A writer first requests its shard from the primary, under a new epoch. A metalog entry that names
this writer (`NewWriters`) makes it the owner of the shard. The writer begins at the first localid
that is not ordered at that entry. If earlier writers stored records from this localid on, these
records are never ordered. A replica refuses the writer's batches until it has applied the entry;
then it notifies the writer.

The writer collects records in the open batch, which is sent when the iteration of the event loop
ends. While `frames_in_flight_max` batches are in flight, the open batch collects further records.
So batches grow with the load (self-clocking).

When a metalog entry finalizes the shard, the writer continues on a new shard with all records that
are not ordered (decision 0055).

A batch leaves memory when a metalog entry orders its records. If no entry orders a batch for
`resend_s`, the writer asks the replicas for their stored prefixes, and asks again after pauses that
double. A batch is resent only to a replica that reports that it lacks the batch. So slow replicas
get no more work. After `append_timeout_s` the callers of a batch get an unknown outcome. The batch
stays, because localids must be consecutive. `Engine` drives the writer; `ConditionalAppends` also
appends through it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    IndilogError,
    NotReadyError,
    OverloadedError,
    SealedError,
)
from indilog.base.ids import Epoch, Instant, LocalId, MetalogPosition, NodeId, ShardId, TagColumns
from indilog.base.resend import Resend
from indilog.config import Config
from indilog.kernel.metalog import Span
from indilog.kernel.records import (
    HEADER_BYTES,
    RECORD_OVERHEAD_BYTES,
    BatchBuilder,
    record_bytes,
)
from indilog.roles.role import Answer, AnswerAppends, Effect, Ignore, Send
from indilog.wire.messages import (
    AppendBatch,
    Message,
    ShardStored,
    ShardStoredWanted,
    ShardWanted,
)
from indilog_compute.full_disks import FullDisks


class Takeover(enum.Enum):
    """The state of the writer's takeover of its shard."""

    ASKING = enum.auto()
    """No metalog entry names this writer yet."""
    OPEN = enum.auto()
    """A metalog entry names this writer."""
    LOST = enum.auto()
    """A writer with a newer epoch has the shard."""
    STOPPED = enum.auto()
    """This node has stopped."""


class _Batch:
    """Records that are sent together.

    A batch is encoded when it is sent, and leaves the queues when it is ordered.

    Attributes:
        bytes: the size that the encoded batch has or will have.
        expired: whether the callers got an unknown outcome after `append_timeout_s`.
        bytes_max, records_max: up to these sizes, the batch accepts records without another check
            of the limits; 0: the limits were not checked yet.
    """

    __slots__ = (
        "accepted", "builder", "bytes", "bytes_max", "encoded", "end", "expired", "first",
        "records_max", "sent", "waiters",
    )  # fmt: skip

    def __init__(self) -> None:
        self.builder = BatchBuilder()
        self.waiters: list[object | None] = []
        self.bytes = HEADER_BYTES
        self.bytes_max = self.records_max = 0
        self.first: LocalId = -1
        self.end: LocalId = -1
        self.encoded = b""
        self.expired = False
        self.accepted = Instant(0.0)
        self.sent = Instant(0.0)


class OrderedBatch:
    """A batch that a metalog entry has ordered."""

    __slots__ = ("data", "first_seqnum", "names", "size_bytes", "time", "waiters")

    def __init__(self, batch: _Batch, first_seqnum: int) -> None:
        self.first_seqnum = first_seqnum
        self.data = batch.builder.data
        self.names = batch.builder.names
        self.size_bytes = batch.bytes
        self.time = int(batch.accepted * 1e6) / 1e6
        """`Record.time` of all records: seconds since 1970, cut to whole microseconds as in the
        stored batch.
        """
        self.waiters = batch.waiters


class ShardWriter:
    """Owns one shard at a time, under one epoch."""

    def __init__(
        self,
        shard: ShardId,
        replicas: Sequence[NodeId],
        epoch: Epoch,
        config: Config,
        *,
        copies: int | None = None,
    ) -> None:
        """`copies`: how many replicas, from the first one on, count for the quorum; None: all."""
        node = config.node
        self.shard = shard
        self.epoch = epoch
        self.takeover = Takeover.ASKING
        self.replicas = tuple(replicas)
        self._copies = copies or len(replicas)
        self._quorum = config.cluster.quorum_of(self._copies)
        self._frame_records_max = node.appends.frame_records_max
        self._in_flight_bytes_max = config.cluster.batch_bytes_max
        self._frame_bytes = min(node.appends.frame_bytes, config.cluster.batch_bytes_max)
        self._frames_in_flight_max = node.appends.frames_in_flight_max
        self._pending_max = node.appends.append_pending_max
        self._pending_bytes_max = node.appends.append_pending_bytes_max
        self._timeout_s = node.appends.append_timeout_s
        self._resend_s = node.messages.resend_s, node.messages.resend_s_max
        self._question = Resend(*self._resend_s)
        """When to ask the primary for the shard again."""
        self._ordering = Resend(*self._resend_s)
        """When to ask the replicas again for their stored prefixes, while batches are in flight."""
        self._open = _Batch()
        self._closed: deque[_Batch] = deque()
        self._in_flight: deque[_Batch] = deque()
        self._next: LocalId = -1
        self._closed_records = 0
        """Records in batches that are closed and not ordered."""
        self._closed_bytes = 0
        self._in_flight_bytes = 0
        self._full_disks = FullDisks()
        self.barrier: LocalId = 0
        """Below this localid lie all records whose append timed out; they may still be ordered."""
        self._sent_again: dict[NodeId, tuple[LocalId, Resend]] = {}
        """By replica: the localid from which on batches were resent, and when to resend them again.
        """

    @property
    def pending(self) -> int:
        """How many records wait to be ordered."""
        return self._closed_records + len(self._open.waiters)

    @property
    def _pending_bytes(self) -> int:
        return self._closed_bytes + (self._open.bytes if self._open.waiters else 0)

    @property
    def is_read_only(self) -> bool:
        """Whether appends are refused because the primary or too many replicas have full disks."""
        return not self._full_disks.permit_appends(self.replicas, self._copies, self._quorum)

    # --- appends

    def add(self, data: bytes, columns: TagColumns, waiter: object | None) -> bool:
        """Put one record into the open batch; return whether the caller must cause a `flush`.

        False: an earlier record of the open batch has already caused a `flush`.

        Raises:
            OverloadedError: too many records, or bytes, wait to be ordered.
            SealedError: another writer has the shard.
            DiskFullError: too many replicas, or the primary, have no disk space left.
            NotReadyError: this node has stopped.
        """
        tags, names = columns
        size = len(data) + len(tags) + len(names) + RECORD_OVERHEAD_BYTES  # as `record_bytes`
        batch = self._open
        waiters = batch.waiters
        first = batch.bytes + size > batch.bytes_max or len(waiters) >= batch.records_max
        if first:
            batch = self._open_for(1, size)
            waiters = batch.waiters
        batch.bytes += size
        # As `BatchBuilder.add`, without the call.
        builder = batch.builder
        builder.data.append(data)
        builder.columns.append(columns)
        waiters.append(waiter)
        return first

    def add_batch(self, records: Sequence[tuple[bytes, TagColumns]], waiter: object) -> None:
        """Put records into one batch, so that all of them are stored and ordered, or none.

        The records may share the open batch with other records, because a batch as a whole is
        atomic. The caller must cause a `flush` afterwards.

        Raises: as `add`; then no record is taken.
        """
        size = sum(record_bytes(*record) for record in records)
        batch = self._open_for(len(records), size)
        batch.bytes += size
        for data, columns in records:
            batch.builder.add(data, columns)
        batch.waiters += [waiter, *[None] * (len(records) - 1)]

    def _open_for(self, records: int, size_bytes: int) -> _Batch:
        """Return the open batch, with room for `records` more records. If they do not fit, the open
        batch is closed, and a new one is returned.

        This method checks all limits, and sets `bytes_max` and `records_max` of the batch. Both
        stay valid while the batch is open, because the number of other waiting appends only falls.
        """
        records_left = self._pending_max - self.pending
        bytes_left = self._pending_bytes_max - self._pending_bytes
        if records_left <= 0 or bytes_left <= 0:
            raise self._overloaded()
        if self.is_read_only or self.takeover in (Takeover.LOST, Takeover.STOPPED):
            raise self.refusal()
        batch = self._open
        if (
            len(batch.waiters) + records > self._frame_records_max
            or batch.bytes + size_bytes > self._frame_bytes
        ):
            self._close()
            batch = self._open
        batch.records_max = min(self._frame_records_max, len(batch.waiters) + records_left)
        batch.bytes_max = min(self._frame_bytes, batch.bytes + bytes_left)
        return batch

    def _overloaded(self) -> OverloadedError:
        return OverloadedError(
            f"{self.pending:,} appends ({self._pending_bytes:,} bytes) wait to be ordered; "
            "try again when some are done."
        )

    def _close(self) -> None:
        if self._open.waiters:
            self._closed.append(self._open)
            self._closed_records += len(self._open.waiters)
            self._closed_bytes += self._open.bytes
            self._open = _Batch()

    def _forget(self, batch: _Batch) -> None:
        """Subtract a batch from the sums, because it no longer waits to be ordered."""
        self._closed_records -= len(batch.waiters)
        self._closed_bytes -= batch.bytes

    def flush(self, now: Instant) -> list[Effect]:
        """Send closed batches and the open one, within the limits for batches in flight."""
        if self.takeover is not Takeover.OPEN:
            return []
        effects: list[Effect] = []
        while (self._closed or self._open.waiters) and (
            len(self._in_flight) < self._frames_in_flight_max
            and self._in_flight_bytes < self._in_flight_bytes_max
        ):
            if not self._closed:
                self._close()
            batch = self._closed.popleft()
            self._seal(batch, now)
            self._in_flight.append(batch)
            self._in_flight_bytes += len(batch.encoded)
            message = AppendBatch(batch.encoded)
            effects += [Send(replica, message) for replica in self.replicas]
        return effects

    def _seal(self, batch: _Batch, now: Instant) -> None:
        batch.first, batch.end = self._next, self._next + len(batch.builder)
        batch.accepted = batch.sent = now
        batch.encoded = batch.builder.build(
            shard=self.shard, epoch=self.epoch, first=batch.first, time_us=int(now * 1e6)
        )
        self._next = batch.end

    def pop_ordered(self, span: Span) -> list[OrderedBatch]:
        """Remove and return the batches that `span` of this shard orders.

        Cuts fall between batches, so a span contains all records of a batch or none. All records of
        the span are from this writer: after an entry that names another writer, no batch is in
        flight.
        """
        done: list[OrderedBatch] = []
        self._ordering.stop()
        end = span.first_localid + span.length
        while self._in_flight and self._in_flight[0].end <= end:
            batch = self._in_flight.popleft()
            self._in_flight_bytes -= len(batch.encoded)
            assert batch.first >= span.first_localid, "spans of a shard are consecutive"
            self._forget(batch)
            offset = batch.first - span.first_localid
            done.append(OrderedBatch(batch, span.first_seqnum + offset))
        return done

    # --- taking the shard over

    def want(self, now: Instant) -> ShardWanted | None:
        """Return the request for the shard; None: no request is due, because the last one was
        answered or its pause is not over.
        """
        if self.takeover is not Takeover.ASKING:
            return None
        if self._question.due is not None and now < self._question.due:
            return None
        self._question.sent(now)
        return ShardWanted(self.shard, self.epoch)

    def make_due(self) -> None:
        """Let `want` return the next request at once, because there is a new primary."""
        self._question.stop()

    def named(self, epoch: Epoch, cut: LocalId) -> list[Effect]:
        """Note the writer that a metalog entry names, and how many records of the shard are ordered
        up to that entry.
        """
        if epoch > self.epoch:
            return self.give_up()
        if epoch == self.epoch and self.takeover is Takeover.ASKING:
            self.takeover = Takeover.OPEN
            self._question.stop()
            if self._next < 0:
                self._next = cut
        return []

    def joined(self, epoch: Epoch, cut: LocalId) -> list[Effect]:
        """Note the writer that the metalog names, and how many records of the shard are ordered.

        A node that joins again does not learn the seqnums of the batches that were ordered
        meanwhile, so their callers get an unknown outcome. If the entry that named this writer was
        replaced, the writer asks for the shard again.
        """
        unknown = AppendOutcomeUnknownError(
            "The order of the newest records was corrected meanwhile; the record is in the log."
        )
        effects: list[Effect] = []
        while self._in_flight and self._in_flight[0].end <= cut:
            batch = self._in_flight.popleft()
            self._in_flight_bytes -= len(batch.encoded)
            self._forget(batch)
            effects += _answers(batch, unknown)
        if epoch < self.epoch and self.takeover is Takeover.OPEN:
            self.takeover = Takeover.ASKING
        return effects + self.named(epoch, cut)

    def continue_on(self, shard: ShardId, replicas: Sequence[NodeId]) -> None:
        """Continue on a new shard, because the applied entry has finalized the old one.

        Batches that are not ordered by now are never ordered on the old shard. After an entry has
        named this node as the writer of the new shard, these batches are sent to the new shard, in
        the same order. Batches whose callers got an unknown outcome are dropped; the log does not
        contain their records.
        """
        kept: list[_Batch] = []
        for batch in self._in_flight:
            if batch.expired:
                self._forget(batch)
                continue
            batch.first = batch.end = -1
            batch.encoded = b""
            kept.append(batch)
        self._closed.extendleft(reversed(kept))
        self._in_flight.clear()
        self._in_flight_bytes = 0
        self._full_disks.forget([node for node in self.replicas if node not in replicas])
        self.shard, self.replicas = shard, tuple(replicas)
        self.takeover = Takeover.ASKING
        self.barrier = 0
        self._next = -1
        self._sent_again.clear()
        self._question.stop()
        self._ordering.stop()

    def move(self, replicas: Sequence[NodeId]) -> list[Effect]:
        """Send batches to other replicas from now on. A new replica is asked for its stored prefix,
        and then gets the batches in flight.
        """
        added = [replica for replica in replicas if replica not in self.replicas]
        self._full_disks.forget([node for node in self.replicas if node not in replicas])
        self.replicas = tuple(replicas)
        self._sent_again = {r: sent for r, sent in self._sent_again.items() if r in replicas}
        if self.takeover is not Takeover.OPEN:
            return []
        return [Send(replica, ShardStoredWanted(self.shard, self.epoch)) for replica in added]

    def on_stored(self, sender: NodeId, message: ShardStored, now: Instant) -> list[Effect]:
        """Resend the batches that a replica lacks; give up if a newer writer has the shard.

        While a replica reports the same stored prefix, batches are resent after pauses that double,
        because a replica may refuse a batch permanently.
        """
        if message.epoch > self.epoch:
            return self.give_up()
        if sender not in self.replicas:
            return [Ignore(message, "stored by a node that is no replica")]
        if message.epoch < self.epoch:
            return []  # the replica answers again when it applies the entry that names this writer
        start, resend = self._sent_again.get(sender, (-1, Resend(*self._resend_s)))
        if message.stored != start:
            resend.stop()
        elif resend.due is not None and now < resend.due:
            return []
        lacking = self._in_flight_to(sender, message.stored)
        if lacking:
            resend.sent(now)
            self._sent_again[sender] = (message.stored, resend)
        return lacking

    def _in_flight_to(self, replica: NodeId, start: LocalId) -> list[Effect]:
        return [
            Send(replica, AppendBatch(batch.encoded))
            for batch in self._in_flight
            if batch.first >= start
        ]

    def on_disk_full(self, sender: NodeId, *, full: bool, now: Instant) -> list[Effect]:
        """Note whether a disk is full. If the writer is then read-only, fail the appends that were
        not sent; batches in flight may still be stored.
        """
        self._full_disks.note(sender, full=full, now=now)
        if not self.is_read_only:
            return []
        self._close()
        effects = [e for batch in self._closed for e in _answers(batch, self._full_disks.error())]
        for batch in self._closed:
            self._forget(batch)
        self._closed.clear()
        return effects

    def give_up(self) -> list[Effect]:
        """Fail all appends, because another writer has the shard. This writer does not request the
        shard again.
        """
        self.takeover = Takeover.LOST
        unknown = AppendOutcomeUnknownError(
            f"Another writer took over shard {self.shard}; the record may or may not be in the log."
        )
        return self._answer_all(unsent=self._lost(), sent=unknown)

    def abandon(self) -> list[Effect]:
        """Fail all appends: this node stops."""
        unsent = NotReadyError("The platform was closed; nothing was appended.")
        unknown = AppendOutcomeUnknownError(
            "The platform was closed before the append was ordered; the record may or may not be "
            "in the log."
        )
        self.takeover = Takeover.STOPPED
        return self._answer_all(unsent=unsent, sent=unknown)

    def _answer_all(self, *, unsent: IndilogError, sent: IndilogError) -> list[Effect]:
        self._closed.append(self._open)
        self._open = _Batch()
        effects = [e for batch in self._closed for e in _answers(batch, unsent)]
        effects += [e for batch in self._in_flight for e in _answers(batch, sent)]
        self._closed.clear()
        self._in_flight.clear()
        self._closed_records = self._closed_bytes = self._in_flight_bytes = 0
        return effects

    def refusal(self) -> IndilogError:
        """Return the error with which appends are refused; called only while they are refused."""
        if self.takeover is Takeover.STOPPED:
            return NotReadyError("The platform has stopped; open it again.")
        return self._lost() if self.takeover is Takeover.LOST else self._full_disks.error()

    def _lost(self) -> SealedError:
        return SealedError(f"Another writer took over shard {self.shard}; append elsewhere.")

    # --- time

    def deadline(self) -> Instant | None:
        """When to resend, to fail an append, or to drop a disk-full notification; None: never."""
        due = self._asked_again_at()
        if (full := self._full_disks.deadline()) is not None:
            due = full if due is None else min(due, full)
        if self._in_flight and (expires := self._expires_at()) is not None:
            due = expires if due is None else min(due, expires)
        return due

    def _asked_again_at(self) -> Instant | None:
        if self.takeover is Takeover.ASKING:
            return self._question.due
        if not self._in_flight:
            return None
        return self._ordering.due or Instant(self._in_flight[0].sent + self._resend_s[0])

    def _expires_at(self) -> Instant | None:
        """When the first batch with waiting callers times out; None: no caller waits."""
        for batch in self._in_flight:
            if batch.waiters[0] is not None or any(w is not None for w in batch.waiters):
                return Instant(batch.accepted + self._timeout_s)
        return None

    def on_time(self, now: Instant) -> list[Effect]:
        """Resend unanswered questions; fail the callers of batches that have timed out."""
        self._full_disks.expire(now)
        effects = self._expire_in_flight(now)
        if (due := self._asked_again_at()) is None or now < due:
            return effects
        if self.takeover is not Takeover.OPEN:
            return effects + self._expire_waiting(now)
        self._ordering.sent(now)
        effects += self._to_all(ShardStoredWanted(self.shard, self.epoch))
        return effects + self._expire_waiting(now)

    def _expire_in_flight(self, now: Instant) -> list[Effect]:
        unknown = AppendOutcomeUnknownError(
            f"The append was not ordered within {self._timeout_s:g} s; the record may or may not "
            "be in the log."
        )
        effects: list[Effect] = []
        for batch in self._in_flight:
            if now < batch.accepted + self._timeout_s:
                break
            self.barrier = max(self.barrier, batch.end)
            batch.expired = True
            effects += _answers(batch, unknown)
        return effects

    def _expire_waiting(self, now: Instant) -> list[Effect]:
        """Refuse the appends of batches that were not sent within `append_timeout_s`."""
        effects: list[Effect] = []
        self._close()
        for batch in self._closed:
            batch.accepted = batch.accepted or now
        while self._closed and now >= self._closed[0].accepted + self._timeout_s:
            batch = self._closed.popleft()
            self._forget(batch)
            effects += _answers(
                batch,
                NotReadyError(
                    f"Shard {self.shard} took nothing for {self._timeout_s:g} s; "
                    "nothing was appended."
                ),
            )
        return effects

    def _to_all(self, message: Message) -> list[Effect]:
        return [Send(replica, message) for replica in self.replicas]

    def check_invariants(self) -> None:
        """Assert that batches in flight are consecutive, and that sums equal the queues."""
        batches = [*self._in_flight, *self._closed]
        assert self._closed_records == sum(len(b.waiters) for b in batches)
        assert self._closed_bytes == sum(b.bytes for b in batches)
        assert bool(self._open.waiters) == bool(self._open.records_max)
        for before, after in zip(self._in_flight, list(self._in_flight)[1:], strict=False):
            assert before.end == after.first
        assert len(self._in_flight) <= self._frames_in_flight_max, (
            "more batches in flight than allowed"
        )
        assert not self._open.waiters or self.takeover is not Takeover.STOPPED
        assert self._sent_again.keys() <= set(self.replicas), "only replicas get batches"


def _answers(batch: _Batch, error: IndilogError) -> list[Effect]:
    """Fail the callers of a batch, each only once; the batch keeps its place in the queue."""
    effects: list[Effect] = [Answer(w, error) for w in batch.waiters if w is not None]
    batch.waiters = [None] * len(batch.waiters)
    return effects


def acknowledgements(batches: Sequence[OrderedBatch], position: MetalogPosition) -> list[Effect]:
    """Return the acknowledgements of ordered batches, with the seqnums of their records."""
    return [AnswerAppends(b.waiters, b.first_seqnum, position) for b in batches]
