"""The replica of a queue in one process: the state of its shards, kept current by reads of the log.

All `Queue` objects of one queue in a process share the replica. So a busy queue is read once per
process, not once per consumer. Every record that can make a message ready has the tag `pushed`. So
one read of this tag finds the shards with new records, for any number of shards. A shard is read
only when a consumer may get a message of it; producers read no shard. The replica uses one
`ShardReplica` per shard, one `MessageCache` and one `Notifications`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Final

from bokiqueue import waiting
from bokiqueue.errors import QueueError, QueueSettingsError, QueueTrimmedError
from bokiqueue.message_cache import MessageCache
from bokiqueue.records import (
    Command,
    PushMessage,
    QueueSettings,
    QueueTags,
    SetAside,
    decode_commands,
    decode_settings,
    encode_settings,
    queue_tags,
    shard_in,
)
from bokiqueue.shard import ShardReplica, Submission, WantedMessages
from bokiqueue.shard_state import Message
from bokiqueue.waiting import Notifications
from indilog import DataLossError, IndilogError, Log, Record, TooLargeError, TrimmedError
from indilog.replayed import ReplicaCache
from indilog.sdk import Event, LogClock, SeqNum

_CLAIMS_PER_SEARCH: Final = 8
"""Claims from shards known to have messages, between two searches for shards with new records."""
_REST_S: Final = 0.1
"""Seconds of log time for which a shard rests after a claim that got no message. During the rest,
the estimated time does not count: leases and delays end only by the time of the shard's records.
"""
_PAGE: Final = 1000
_QUEUES_MAX: Final = 1024
"""Largest number of replicas in memory for one platform. The least recently used replicas are
evicted first.
"""


class QueueReplica:
    """All shards of one queue, in one process.

    Args:
        name: name of the queue.
        shards: number of its shards.
        consumes: numbers of the shards whose messages consumers of this process get; None: all.
    """

    def __init__(self, name: str, shards: int, consumes: Sequence[int] | None = None) -> None:
        self.tags: QueueTags = queue_tags(name, shards)
        self.notifications = Notifications(
            self.tags.pushed, self.due_in_s, self._note_records, self._note_records_below
        )
        self.clock = LogClock(lambda: waiting.seconds_now())  # noqa: PLW0108 - tests replace it
        self._contents = MessageCache()
        self.shards = [
            ShardReplica(name, number, self.tags, self._contents, self.clock)
            for number in range(shards)
        ]
        self._consumed = [
            shard for shard in self.shards if consumes is None or shard.number in consumes
        ]
        self.rotation = count()
        """Numbers by which shards are selected round-robin, for messages without a key."""
        self._name = name
        self._opened = False
        self._opening: Event | None = None
        self._cursor: SeqNum = 0
        self._next_shard = 0
        self._claims_since_search = _CLAIMS_PER_SEARCH
        self._claims_failed = 0

    # --- opening

    async def open(self, log: Log) -> None:
        """Read the settings, or record them on first use. The first caller does so for all callers.

        Raises:
            QueueSettingsError: the queue was created with another number of shards.
            QueueTrimmedError: the whole log of the queue was trimmed.
        """
        while not self._opened:
            if self._opening is not None:
                await self._opening.wait()
                continue
            self._opening = opening = Event()
            try:
                await self._open(log)
            finally:
                self._opening = None
                opening.set()

    async def _open(self, log: Log) -> None:
        settings = await self._settings(log)
        if settings.shards != len(self.shards):
            raise QueueSettingsError(
                f"Queue {self._name!r} was created with {settings.shards} shards, "
                f"not {len(self.shards)}; open it with shards={settings.shards}."
            )
        tail = await log.tail()
        await self.clock.begin(log)
        self._note_records_below(tail)
        self._cursor = tail
        self._opened = True

    async def _settings(self, log: Log) -> QueueSettings:
        """Return the first recorded settings. If there are none, record them first."""
        while True:
            if (settings := await read_settings(log, self._name)) is not None:
                return settings
            mine = encode_settings(QueueSettings(len(self.shards)))
            await log.append(mine, tags=[self.tags.settings])

    # --- new records

    async def _find_new_records(self, log: Log) -> bool:
        """Read one page to find shards with new records; False: there are no further pages."""
        try:
            page = await log.read_range(self.tags.pushed, self._cursor, limit=_PAGE)
        except TrimmedError as error:
            self._cursor = max(self._cursor, error.first_seqnum)
            self._note_records_below(error.first_seqnum)
            return True
        except (
            DataLossError
        ) as error:  # reads of the shards find out to which shard each lost record belonged
            if error.next_seqnum is None or error.next_seqnum <= self._cursor:
                raise
            self._cursor = error.next_seqnum
            self._note_records_below(error.next_seqnum)
            return True
        if page:
            self._cursor = max(self._cursor, page[-1].seqnum + 1)
            self._note_records(page)
        return bool(page)

    def _note_records(self, records: Sequence[Record]) -> None:
        """Note that shards have new records, which have the tag `pushed`."""
        for record in records:
            if (number := shard_in(record.tags, self.tags)) is not None:
                self.shards[number].note_records_below(record.seqnum + 1)

    def _note_records_below(self, records_below: SeqNum) -> None:
        """Note that any shard may have new records below `records_below`."""
        for shard in self.shards:
            shard.note_records_below(records_below)

    async def catch_up(
        self, log: Log, shard: ShardReplica, until: SeqNum, *, is_in_session: bool = False
    ) -> None:
        """Apply the records of a shard below `until` (`Replica.catch_up_to`).

        Raises:
            QueueTrimmedError: the whole log of the queue was trimmed.
        """
        await shard.catch_up(log, until, is_in_session=is_in_session)
        self.notifications.due(self._due_in_s(shard))

    async def data(
        self, log: Log, shard: ShardReplica, message: Message, *, is_delivered: bool
    ) -> bytes | None:
        """Return the bytes of a message; None: the message is no longer in the queue.

        Args:
            log: log to read.
            shard: shard of the message.
            message: the message, as it is in the state of `shard`.
            is_delivered: whether a consumer gets the bytes, so that they need not stay in memory.

        Raises:
            QueueTrimmedError: the whole log of the queue was trimmed.
        """
        cached = self._contents.take if is_delivered else self._contents.get
        if (data := cached(message.seqnum)) is not None:
            return data
        return await self._stored_data(log, shard, message)

    async def _stored_data(self, log: Log, shard: ShardReplica, message: Message) -> bytes | None:
        content = message.content
        try:
            record = await log.read(content) or await log.read(content, fresh=True)
        except TrimmedError as error:
            # The bytes were set aside by another process, or the message was acknowledged.
            await self.catch_up(log, shard, await log.tail(), is_in_session=True)
            now = shard.state.message(message.seqnum)
            if now is None:
                return None
            if now.content == content:
                raise QueueTrimmedError(self._name, error.first_seqnum) from error
            return await self._stored_data(log, shard, now)
        for command in () if record is None else decode_commands(record.data):
            if isinstance(command, PushMessage | SetAside):
                return command.data
        raise QueueError(f"The message at seqnum {message.seqnum} cannot be read.")

    def due_in_s(self) -> float | None:
        """Return the seconds until a consumed shard has a ready message that no undecided claim of
        this process gets; None: no message becomes ready without a further record.
        """
        dues = (due for s in self._consumed if (due := self._due_in_s(s)) is not None)
        return min(dues, default=None)

    def _due_in_s(self, shard: ShardReplica) -> float | None:
        if shard.has_ready(self._log_time(shard)):
            return 0.0
        due = shard.state.next_due()
        return None if due is None else max(due, shard.rests_until) - self.clock.now()

    # --- claims

    async def next_available(self, log: Log) -> ShardReplica | None:
        """Return a shard in which a claim may get a message now, round-robin.

        While one shard has messages, other shards are searched only every few claims.
        """
        self._claims_since_search += 1
        if self._claims_since_search <= _CLAIMS_PER_SEARCH:
            shard = self._round_robin(lambda one: one.may_have_message(self._log_time(one)))
            if shard is not None:
                return shard
        self._claims_since_search = 0
        while True:
            has_more = await self._find_new_records(log)
            shard = self._round_robin(lambda one: one.may_have_message(self._log_time(one)))
            if shard is not None or not has_more:
                return shard

    def _round_robin(self, wanted: Callable[[ShardReplica], bool]) -> ShardReplica | None:
        shards = self._consumed
        for step in range(len(shards)):
            place = (self._next_shard + step) % len(shards)
            if wanted(shards[place]):
                self._next_shard = (place + 1) % len(shards)
                return shards[place]
        return None

    def _log_time(self, shard: ShardReplica) -> float:
        """Return the log time by which leases and delays of a shard end. During a rest (`_REST_S`)
        it is the time of the shard's last record, otherwise the estimate. It only tells when to
        claim; `ordered_at` of the records decides who gets a message.
        """
        log_time = self.clock.now()
        return log_time if log_time >= shard.rests_until else shard.state.clock

    async def claim(
        self, log: Log, shard: ShardReplica, lease_s: float, count: int = 1
    ) -> Submission | None:
        """Claim up to `count` messages; return None if the claim got no message."""
        if not shard.has_unclaimed(self._log_time(shard)):
            await self.catch_up(log, shard, shard.records_below)
            if not shard.has_unclaimed(self._log_time(shard)):
                return None
        decided = Event()
        shard.claims[decided] = count
        try:
            claimed = await self.submit(log, shard, WantedMessages(lease_s, count))
        except BaseException:
            self._claims_failed += 1
            raise
        finally:
            del shard.claims[decided]
            decided.set()
            self.notifications.due(self._due_in_s(shard))
        if claimed.touched:
            return claimed
        await self._rest_after_empty_claim(log, shard)
        return None

    async def _rest_after_empty_claim(self, log: Log, shard: ShardReplica) -> None:
        """Begin a rest (`_REST_S`), because the estimated time may be wrong. If the estimate says
        that a lease or delay has ended, ask the log for its time.
        """
        shard.rests_until = shard.state.clock + _REST_S
        due = shard.state.next_due()
        if due is not None and due <= self.clock.now():
            await self.clock.ask(log)

    async def has_failed_claims(self) -> bool:
        """Wait for the undecided claims of this process, and return whether one of them failed. The
        message of a failed claim may still be ready.
        """
        before = self._claims_failed
        for decided in [event for shard in self.shards for event in shard.claims]:
            await decided.wait()
        return self._claims_failed > before

    async def submit(
        self, log: Log, shard: ShardReplica, wanted: Command | WantedMessages
    ) -> Submission:
        """Append a command and return its outcome (`ShardReplica.submit`)."""
        done = await shard.submit(log, wanted)
        self.notifications.due(self._due_in_s(shard))
        return done

    # --- checkpoints

    async def save(self, log: Log, shard: ShardReplica) -> None:
        """Write a checkpoint if one is due, and trim superseded records.

        Errors of the log are suppressed, because the caller's command has already taken effect. A
        later checkpoint replaces a checkpoint that failed.
        """
        if not shard.is_save_due or shard.is_saving:
            return
        shard.is_saving = True
        try:
            with suppress(IndilogError):
                for message in shard.to_set_aside():
                    with suppress(DataLossError, TooLargeError):  # it stays where it is
                        if (data := await self._stored_data(log, shard, message)) is not None:
                            await shard.set_aside(log, message.seqnum, data)
                await shard.save(log)
                await log.trim(self._cursor, tag=self.tags.pushed)
        finally:
            shard.is_saving = False
            self.notifications.due(self._due_in_s(shard))


async def read_settings(log: Log, name: str) -> QueueSettings | None:
    """Return the first recorded settings of a queue; None: there is no such queue.

    Raises:
        QueueTrimmedError: the whole log of the queue was trimmed.
    """
    bound = 0
    while True:
        try:
            record = await log.read_next(queue_tags(name, 1).settings, bound)
        except TrimmedError as error:
            raise QueueTrimmedError(name, error.first_seqnum) from error
        if record is None:
            return None
        if (settings := decode_settings(record.data)) is not None:
            return settings
        bound = record.seqnum + 1


_REPLICAS: Final = ReplicaCache[QueueReplica](_QUEUES_MAX)


def replica_of(
    log: Log, name: str, shards: int, consumes: tuple[int, ...] | None = None
) -> QueueReplica:
    """Return the replica that all `Queue` objects with these arguments share in this process, for
    one platform (`Log.scope`).
    """
    key = (name, shards, consumes)
    return _REPLICAS.get(log, key, lambda: QueueReplica(name, shards, consumes))
