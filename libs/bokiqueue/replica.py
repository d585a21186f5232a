"""The replica of a queue in one process: the state of its shards, kept current by reads of the log.

All `Queue` objects of one queue in a process share the replica, so a busy queue is read once, not
once per consumer. The replica is derived from the log. Every record that can make a message ready
has the tag `pushed`. So one read finds the shards with new records, for any number of shards.

Coroutines share a state. A coroutine applies only records that the state does not have, and does
not await in between. If several coroutines need new records of a shard at the same time, one of
them reads for all.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Final
from weakref import WeakKeyDictionary

from bokiqueue import waiting
from bokiqueue.checkpoints import find_furthest, write
from bokiqueue.errors import QueueError, QueueSettingsError, QueueTrimmedError
from bokiqueue.message_cache import MessageCache
from bokiqueue.records import (
    Acknowledge,
    Claim,
    DiscardDeadLetters,
    PushMessage,
    QueueTags,
    Settings,
    decode_command,
    decode_settings,
    encode,
    queue_tags,
    shard_in,
)
from bokiqueue.shard_state import ShardState
from bokiqueue.waiting import Notifications
from indilog import (
    AppendOutcomeUnknownError,
    DataLossError,
    IndilogError,
    Log,
    Record,
    TrimmedError,
)
from indilog.sdk import Event, LogClock, SeqNum, append_outcome_unknown, check_own_append, name_loss

CHECKPOINT_EVERY: Final = 1024
"""Smallest number of a shard's records between two checkpoints."""
_MESSAGES_PER_RECORD: Final = 4
"""Messages in a checkpoint per new record after which the next checkpoint is due, so that
checkpoints and records cost about the same.
"""
KEPT_BEHIND: Final[int] = 128
"""Number of records before a checkpoint that are not trimmed yet, because processes with appends in
flight may still read them.
"""
_OUTCOMES_MAX: Final = 4096
"""Largest number of outcomes of commands that a shard keeps for their callers."""
_CLAIMS_PER_SEARCH: Final = 8
_REST_S: Final = 0.1
"""Seconds after an empty claim during which no message is claimed that is due only by the estimated
time.
"""
_PAGE: Final = 1000


class ShardReplica:
    """The state of one shard, and this process's state of reads and claims.

    Attributes:
        records_below: seqnum below which there may be records that are not applied.
        seen: seqnum below which certainly all records are applied.
        reading: an event that is set when the read in progress has finished; None: no read is in
            progress.
        claims: claims of this process in flight; each event is set when its claim is decided.
        rests_until: log time until which no message is claimed that is due only by the estimated
            time.
        unsaved: number of records applied since the last known checkpoint.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.state = ShardState()
        self.records_below: SeqNum = 0
        self.seen: SeqNum = 0
        self.reading: Event | None = None
        self.claims: list[Event] = []
        self.rests_until = 0.0
        self.unsaved = 0
        self._recent: deque[SeqNum] = deque(maxlen=KEPT_BEHIND)
        self._outcomes: OrderedDict[SeqNum, tuple[SeqNum, ...]] = OrderedDict()

    def restart(self, state: ShardState) -> None:
        """Continue from a checkpoint."""
        assert state.end >= self.state.end, "a shard never goes back"
        self.state, self.unsaved = state, 0

    def apply(self, record: Record, contents: MessageCache) -> None:
        """Apply a record, unless it was applied before; keep its message in `contents`."""
        if record.seqnum < self.state.end:
            return
        command = decode_command(record.data)
        outcome = self.state.apply(record.seqnum, record.ordered_at, command)
        self.unsaved += 1
        assert self.state.end == record.seqnum + 1, "the state has this record"
        self._recent.append(record.seqnum)
        if isinstance(command, PushMessage):
            contents.keep(record.seqnum, command.data)
        elif command is not None:
            if isinstance(command, Acknowledge | DiscardDeadLetters):
                contents.forget(outcome)
            self._outcomes[record.seqnum] = outcome
            if len(self._outcomes) > _OUTCOMES_MAX:
                self._outcomes.popitem(last=False)
            assert len(self._outcomes) <= _OUTCOMES_MAX, "the oldest outcome was dropped"

    @property
    def recent(self) -> SeqNum:
        """The seqnum of the first recent record; callers may still have to read the recent
        records.
        """
        return self._recent[0] if self._recent else self.state.end

    def outcome(self, seqnum: SeqNum) -> tuple[SeqNum, ...]:
        """Return the messages that the command at `seqnum` affected.

        Raises:
            AppendOutcomeUnknownError: the command was trimmed before it was read here.
        """
        outcome = self._outcomes.pop(seqnum, None)
        if outcome is None:
            raise AppendOutcomeUnknownError(
                f"The command at seqnum {seqnum} was trimmed before its outcome could be read; "
                "if it had no effect, the message is delivered again."
            )
        return outcome

    def take_claimed(self, claim: SeqNum) -> tuple[SeqNum, ...]:
        """Return the messages that a claim got; or, if its record was trimmed, the messages that it
        holds.
        """
        outcome = self._outcomes.pop(claim, None)
        return self.state.held_by(claim) if outcome is None else outcome

    def note_records_below(self, records_below: SeqNum) -> None:
        """Note that there may be new records below `records_below`."""
        self.records_below = max(self.records_below, records_below)

    @property
    def known(self) -> SeqNum:
        """The seqnum below which all records are applied."""
        return max(self.seen, self.state.end)

    @property
    def stale(self) -> bool:
        """Whether there may be records that are not applied."""
        return self.known < self.records_below

    def has_unclaimed(self, now: float) -> bool:
        """Whether more messages may be ready than the claims in flight can take."""
        return self.state.ready(now) > len(self.claims)

    def available(self, now: float) -> bool:
        """Whether one more claim may get a message."""
        return self.stale or self.has_unclaimed(now)


class QueueReplica:
    """All shards of one queue, in one process."""

    def __init__(self, name: str, shards: int) -> None:
        self.tags: QueueTags = queue_tags(name, shards)
        self.notifications = Notifications(self.tags.pushed, self.due_in_s)
        self.clock = LogClock(lambda: waiting.seconds_now())  # noqa: PLW0108 - tests replace it
        self.shards = [ShardReplica(number) for number in range(shards)]
        self.rotation = count()
        """Selects shards round-robin, for messages without a key."""
        self._name = name
        self._opened = False
        self._opening: Event | None = None
        self._cursor: SeqNum = 0
        self._next_shard = 0
        self._claims_since_search = _CLAIMS_PER_SEARCH
        self._claims_failed = 0
        self._contents = MessageCache()

    # --- opening

    async def open(self, log: Log) -> None:
        """Read or record the settings, and start from the checkpoints. The first caller does this
        for all callers.

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
        for shard in self.shards:
            await self._load(log, shard)
            shard.note_records_below(tail)
        self._cursor = tail
        self._opened = True

    async def _settings(self, log: Log) -> Settings:
        """Return the first recorded settings; record them if there are none."""
        bound = 0
        while True:
            try:
                record = await log.read_next(self.tags.settings, bound)
            except TrimmedError as error:
                raise QueueTrimmedError(self._name, error.first_seqnum) from error
            if record is None:
                mine = encode(Settings(len(self.shards)))
                await log.append(mine, tags=[self.tags.settings])
                continue
            if (settings := decode_settings(record.data)) is not None:
                return settings
            bound = record.seqnum + 1

    async def _load(self, log: Log, shard: ShardReplica) -> DataLossError | None:
        """Continue from the checkpoint that covers the most, if it is ahead of the state. Return
        the loss if a lost checkpoint may cover even more.
        """
        kept, lost = await find_furthest(log, self.tags.checkpoints[shard.number])
        if kept is not None and kept.checkpoint.end > shard.state.end:
            shard.restart(ShardState(kept.checkpoint))
        return lost

    # --- new records

    async def _find_new_records(self, log: Log) -> bool:
        """Read one page to find shards with new records; False: there are no further pages."""
        try:
            page = await log.read_range(self.tags.pushed, self._cursor, limit=_PAGE)
        except TrimmedError as error:
            self._cursor = max(self._cursor, error.first_seqnum)
            for shard in self.shards:
                shard.note_records_below(error.first_seqnum)
            return True
        except (
            DataLossError
        ) as error:  # reads of the shards find out to which shard the lost records belonged
            if error.next_seqnum is None or error.next_seqnum <= self._cursor:
                raise
            self._cursor = error.next_seqnum
            for shard in self.shards:
                shard.note_records_below(error.next_seqnum)
            return True
        for record in page:
            if record.seqnum >= self._cursor:
                self._cursor = record.seqnum + 1
                if (number := shard_in(record.tags, self.tags)) is not None:
                    self.shards[number].note_records_below(record.seqnum + 1)
        return bool(page)

    async def catch_up(
        self, log: Log, shard: ShardReplica, until: SeqNum, *, is_in_session: bool = False
    ) -> None:
        """Apply the records of a shard below `until`, unless another coroutine is doing it.

        Args:
            log: log to read.
            shard: shard to bring up to date.
            until: seqnum where to stop; later records of the same page are applied, too.
            is_in_session: whether the session of `log` sees the records below `until`. Otherwise
                `until` may come from another session, so an empty read is repeated with `fresh`.
        """
        while shard.known < until:
            if shard.reading is not None:
                await shard.reading.wait()
                continue
            shard.reading = reading = Event()
            try:
                await self._read_new(log, shard, until, is_in_session=is_in_session)
            finally:
                shard.reading = None
                reading.set()

    async def _read_new(
        self, log: Log, shard: ShardReplica, until: SeqNum, *, is_in_session: bool
    ) -> None:
        """Read page by page. A short page need not be the last, because pages are also limited in
        bytes.
        """
        tag, ask_all = self.tags.shards[shard.number], False
        while shard.known < until:
            try:
                page = await log.read_range(tag, shard.state.end, limit=_PAGE, fresh=ask_all)
            except TrimmedError as error:
                # The floor may become visible before the checkpoint, although the checkpoint was
                # appended first.
                await log.tail()
                lost = await self._load(log, shard)
                if shard.state.end < error.first_seqnum:
                    if lost is not None:
                        raise self._name_shard(shard, lost) from error
                    raise QueueTrimmedError(self._name, error.first_seqnum) from error
                continue
            except DataLossError as error:
                raise self._name_shard(shard, error) from error
            for record in page:
                self.clock.read(record.ordered_at)
                shard.apply(record, self._contents)
            self.notifications.due(self._due_in_s(shard))
            if not page and (is_in_session or ask_all):
                shard.seen = until
            ask_all = not page

    def _name_shard(self, shard: ShardReplica, error: DataLossError) -> DataLossError:
        return name_loss(f"Shard {shard.number} of queue {self._name!r}", error)

    async def data(self, log: Log, seqnum: SeqNum) -> bytes:
        """Return the bytes of an outstanding message."""
        if (data := self._contents.take(seqnum)) is not None:
            return data
        try:
            record = await log.read(seqnum)
        except TrimmedError as error:
            raise QueueTrimmedError(self._name, error.first_seqnum) from error
        push = None if record is None else decode_command(record.data)
        if not isinstance(push, PushMessage):
            raise QueueError(f"The message at seqnum {seqnum} cannot be read.")
        return push.data

    def due_in_s(self) -> float | None:
        """Return the seconds until the next lease or delay of any shard ends."""
        dues = (due for s in self.shards if (due := self._due_in_s(s)) is not None)
        return min(dues, default=None)

    def _due_in_s(self, shard: ShardReplica) -> float | None:
        due = shard.state.next_due()
        return None if due is None else max(due, shard.rests_until) - self.clock.now()

    # --- claims

    async def next_available(self, log: Log) -> ShardReplica | None:
        """Return a shard in which a claim may get a message now, round-robin.

        While one shard has messages, other shards are polled only every few claims.
        """
        self._claims_since_search += 1
        if self._claims_since_search <= _CLAIMS_PER_SEARCH:
            shard = self._round_robin(lambda one: one.available(self._log_time(one)))
            if shard is not None:
                return shard
        self._claims_since_search = 0
        while True:
            has_more = await self._find_new_records(log)
            shard = self._round_robin(lambda one: one.available(self._log_time(one)))
            if shard is not None or not has_more:
                return shard

    def _round_robin(self, wanted: Callable[[ShardReplica], bool]) -> ShardReplica | None:
        shards = self.shards
        for step in range(len(shards)):
            shard = shards[(self._next_shard + step) % len(shards)]
            if wanted(shard):
                self._next_shard = (shard.number + 1) % len(shards)
                return shard
        return None

    def _log_time(self, shard: ShardReplica) -> float:
        """Return the estimated log time for leases and delays of a shard. The estimate only tells
        when to claim; `ordered_at` of the records decides.
        """
        log_time = self.clock.now()
        return log_time if log_time >= shard.rests_until else shard.state.clock

    async def claim(
        self, log: Log, shard: ShardReplica, lease_s: float
    ) -> tuple[SeqNum, SeqNum] | None:
        """Claim a message; return the seqnums of claim and message; None: the claim got no
        message.
        """
        if not shard.has_unclaimed(self._log_time(shard)):
            await self.catch_up(log, shard, shard.records_below)
            if not shard.has_unclaimed(self._log_time(shard)):
                return None
        decided = Event()
        shard.claims.append(decided)
        try:
            claim = await self.append_command(log, shard, encode(Claim(1, lease_s)))
        except BaseException:
            self._claims_failed += 1
            raise
        finally:
            shard.claims.remove(decided)
            decided.set()
        got = shard.take_claimed(claim)
        if not got:
            await self._rest_after_empty_claim(log, shard)
        return (claim, got[0]) if got else None

    async def _rest_after_empty_claim(self, log: Log, shard: ShardReplica) -> None:
        """Pause claims for messages that are due only by the estimated time, which may be wrong."""
        shard.rests_until = shard.state.clock + _REST_S
        due = shard.state.next_due()
        if due is not None and due <= self.clock.now():
            await self.clock.ask(log)

    async def has_failed_claims(self) -> bool:
        """Wait for the claims of this process in flight; return whether one failed. If so, its
        message may still be ready.
        """
        before = self._claims_failed
        for decided in [event for shard in self.shards for event in shard.claims]:
            await decided.wait()
        return self._claims_failed > before

    async def append_command(
        self, log: Log, shard: ShardReplica, command: bytes, *, wakes: bool = False
    ) -> SeqNum:
        """Append a command and catch up with it; `wakes`: the command can make messages ready.

        Raises:
            AppendOutcomeUnknownError: as for `Log.append`; or the command was appended, and its
                effect cannot be read now.
        """
        tags = [self.tags.shards[shard.number]]
        if wakes:
            tags.append(self.tags.pushed)
        seqnum = await log.append(command, tags=tags)
        with append_outcome_unknown(seqnum):
            await self.catch_up(log, shard, seqnum + 1)
            check_own_append(seqnum, shard.state.end)
        return seqnum

    # --- checkpoints

    async def save(self, log: Log, shard: ShardReplica) -> None:
        """After many records, write a checkpoint and trim superseded records.

        Concurrent checkpoints are safe: each is correct, and the one that covers the most is kept
        and decides up to where records are trimmed. Errors of the log are suppressed, because the
        caller's command has taken effect and a later checkpoint replaces this one.
        """
        if shard.unsaved >= max(CHECKPOINT_EVERY, shard.state.kept // _MESSAGES_PER_RECORD):
            shard.unsaved = 0
            with suppress(IndilogError):
                await self._save(log, shard)

    async def _save(self, log: Log, shard: ShardReplica) -> None:
        tag = self.tags.checkpoints[shard.number]
        await write(log, tag, shard.state.checkpoint())
        kept, lost = await find_furthest(log, tag)
        if lost is not None:
            return  # the lost checkpoint may become readable again and cover more
        if kept is None:
            return  # another process has trimmed this one, after one that covers more
        await log.trim(kept.seqnum, tag=tag)
        assert kept.needed_from <= kept.checkpoint.end, "a checkpoint covers older records"
        needed = min(kept.needed_from, shard.recent)
        assert shard.recent <= shard.state.end, "recent records have been applied"
        await log.trim(needed, tag=self.tags.shards[shard.number])
        await log.trim(min(map(self._pushed_needed_from, self.shards)), tag=self.tags.pushed)

    def _pushed_needed_from(self, shard: ShardReplica) -> SeqNum:
        """Return the seqnum of the first record with the tag `pushed` that a shard needs. An unused
        shard needs no record below the cursor, because all pushes below it were registered.
        """
        if shard.state.kept or shard.stale:
            return shard.state.needed_from
        return max(shard.known, self._cursor)


_REPLICAS: Final[WeakKeyDictionary[object, dict[tuple[str, str, int], QueueReplica]]] = (
    WeakKeyDictionary()
)
_QUEUES_MAX: Final = 1024
"""Largest number of replicas in memory for one platform; the one opened first is evicted first."""


def replica_of(log: Log, name: str, shards: int) -> QueueReplica:
    """Return the replica that all queues of a platform share in this process (`Log.scope`)."""
    replicas = _REPLICAS.setdefault(log.scope, {})
    key = (log.name, name, shards)
    if key not in replicas:
        if len(replicas) >= _QUEUES_MAX:
            del replicas[next(iter(replicas))]
        replicas[key] = QueueReplica(name, shards)
    return replicas[key]
