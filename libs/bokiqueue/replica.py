"""One process's copy of a queue: the folds of its shards, kept up to date by reading what is new.

All `Queue`s of a platform and process share it, so a busy queue is read once and not once a
consumer. Everything in it follows from the log. Which shards have news is known from the tag
`pushed`, which stands on every record that can make a message ready, so looking for work costs one
read however many shards there are.

Coroutines share a fold: of what a read brings, only what the fold has not seen is applied, and
nothing is awaited in between. Of those who need what is new in a shard at the same time one reads
for all.
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
from bokiqueue.contents import Contents
from bokiqueue.errors import QueueError, QueueSettingsError, QueueTrimmedError
from bokiqueue.fold import ShardFold
from bokiqueue.records import (
    Acknowledge,
    Claim,
    DiscardDeadLetters,
    PushMessage,
    QueueTags,
    Settings,
    command_decoded,
    encoded,
    settings_decoded,
    shard_in,
    tags_of,
)
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
"""Records of a shard between two checkpoints, at least."""
_MESSAGES_PER_RECORD: Final = 4
"""Of those that a checkpoint has, for each record before it: it costs about what they do."""
KEPT_BEHIND: Final[int] = 128
"""Records behind a checkpoint that are not trimmed yet: others may not have read theirs of them."""
_OUTCOMES_MAX: Final = 4096
"""Outcomes of commands that a shard remembers for the replicas that appended them."""
_CLAIMS_PER_LOOK: Final = 8
_REST_S: Final = 0.1
"""After a claim that found nothing, none for what seems to be due alone."""
_PAGE: Final = 1000


class ShardReplica:
    """The fold of one shard, and what this process knows beside it.

    Attributes:
        news: below this seqnum there may be something that the fold has not seen.
        seen: below this seqnum there is proven to be no record beyond the end of the fold.
        reading: while one reads what is new for all; set when it is done, and all go on together.
        claims: of this process that are under way; each is set when it is decided.
        rests_until: before this time of the log, what seems due but is not ready is not claimed.
        unsaved: records applied since the last checkpoint known.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.fold = ShardFold()
        self.news: SeqNum = 0
        self.seen: SeqNum = 0
        self.reading: Event | None = None
        self.claims: list[Event] = []
        self.rests_until = 0.0
        self.unsaved = 0
        self._recent: deque[SeqNum] = deque(maxlen=KEPT_BEHIND)
        self._outcomes: OrderedDict[SeqNum, tuple[SeqNum, ...]] = OrderedDict()

    def restart(self, fold: ShardFold) -> None:
        """Go on from a checkpoint."""
        self.fold, self.unsaved = fold, 0

    def apply(self, record: Record, contents: Contents) -> None:
        """Take in a record, unless the fold has seen it; `contents`: of the queue's messages."""
        if record.seqnum < self.fold.end:
            return
        command = command_decoded(record.data)
        outcome = self.fold.apply(record.seqnum, record.ordered_at, command)
        self.unsaved += 1
        self._recent.append(record.seqnum)
        if isinstance(command, PushMessage):
            contents.keep(record.seqnum, command.data)
        elif command is not None:
            if isinstance(command, Acknowledge | DiscardDeadLetters):
                contents.forget(outcome)
            self._outcomes[record.seqnum] = outcome
            if len(self._outcomes) > _OUTCOMES_MAX:
                self._outcomes.popitem(last=False)

    @property
    def recent(self) -> SeqNum:
        """The first of the last records, those that a consumer may be about to read."""
        return self._recent[0] if self._recent else self.fold.end

    def outcome(self, seqnum: SeqNum) -> tuple[SeqNum, ...]:
        """Return what the command at `seqnum` had an effect on.

        Raises:
            AppendOutcomeUnknownError: it was trimmed before it was read here.
        """
        outcome = self._outcomes.pop(seqnum, None)
        if outcome is None:
            raise AppendOutcomeUnknownError(
                f"The command at seqnum {seqnum} was trimmed before its outcome was read; "
                "if it did not count, the message comes again."
            )
        return outcome

    def claimed(self, claim: SeqNum) -> tuple[SeqNum, ...]:
        """Return what the claim at this seqnum got; if it was trimmed, what it holds."""
        outcome = self._outcomes.pop(claim, None)
        return self.fold.held_by(claim) if outcome is None else outcome

    def note_news(self, news: SeqNum) -> None:
        """Know that there may be something new below `news`."""
        self.news = max(self.news, news)

    @property
    def known(self) -> SeqNum:
        """All records below it are applied."""
        return max(self.seen, self.fold.end)

    @property
    def stale(self) -> bool:
        """Whether there may be something that the fold has not seen."""
        return self.known < self.news

    def has_unclaimed(self, now: float) -> bool:
        """Whether more may be ready than the claims under way can take."""
        return self.fold.ready(now) > len(self.claims)

    def available(self, now: float) -> bool:
        """Whether a further claim may find something."""
        return self.stale or self.has_unclaimed(now)


class QueueReplica:
    """All shards of one queue, in one process."""

    def __init__(self, name: str, shards: int) -> None:
        self.tags: QueueTags = tags_of(name, shards)
        self.news = Notifications(self.tags.pushed, self.due_in_s)
        self.clock = LogClock(lambda: waiting.seconds_now())  # noqa: PLW0108 - tests replace it
        self.shards = [ShardReplica(number) for number in range(shards)]
        self.rotation = count()
        """Over the shards, for messages without a key."""
        self._name = name
        self._opened = False
        self._opening: Event | None = None
        self._cursor: SeqNum = 0
        self._turn = 0
        self._claims_since_look = _CLAIMS_PER_LOOK
        self._claims_failed = 0
        self._contents = Contents()

    # --- opening

    async def open(self, log: Log) -> None:
        """Agree on the settings and begin at the checkpoints; one caller does it for all.

        Raises:
            QueueSettingsError: the queue was made with another number of shards.
            QueueTrimmedError: its log was trimmed as a whole.
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
                f"Queue {self._name!r} was made with {settings.shards} shards, "
                f"not {len(self.shards)}; open it with shards={settings.shards}."
            )
        tail = await log.tail()
        await self.clock.begin(log)
        for shard in self.shards:
            await self._load(log, shard)
            shard.note_news(tail)
        self._cursor = tail
        self._opened = True

    async def _settings(self, log: Log) -> Settings:
        """Return what the first record of settings says; write one if there is none."""
        bound = 0
        while True:
            try:
                record = await log.read_next(self.tags.settings, bound)
            except TrimmedError as error:
                raise QueueTrimmedError(self._name, error.first_seqnum) from error
            if record is None:
                mine = encoded(Settings(len(self.shards)))
                await log.append(mine, tags=[self.tags.settings])
                continue
            if (settings := settings_decoded(record.data)) is not None:
                return settings
            bound = record.seqnum + 1

    async def _load(self, log: Log, shard: ShardReplica) -> DataLossError | None:
        """Begin at the checkpoint that is furthest on, if it is further than the fold; return what
        may be lost of a better one.
        """
        kept, lost = await find_furthest(log, self.tags.checkpoints[shard.number])
        if kept is not None and kept.checkpoint.end > shard.fold.end:
            shard.restart(ShardFold(kept.checkpoint))
        return lost

    # --- what is new

    async def _look(self, log: Log) -> bool:
        """Find out which shards have news, from one page; False: there are no others."""
        try:
            page = await log.read_range(self.tags.pushed, self._cursor, limit=_PAGE)
        except TrimmedError as error:
            self._cursor = max(self._cursor, error.first_seqnum)
            for shard in self.shards:
                shard.note_news(error.first_seqnum)
            return True
        except DataLossError as error:  # whose news they were, the shards find out or say
            if error.next_seqnum is None or error.next_seqnum <= self._cursor:
                raise
            self._cursor = error.next_seqnum
            for shard in self.shards:
                shard.note_news(error.next_seqnum)
            return True
        for record in page:
            if record.seqnum >= self._cursor:
                self._cursor = record.seqnum + 1
                if (number := shard_in(record.tags, self.tags)) is not None:
                    self.shards[number].note_news(record.seqnum + 1)
        return bool(page)

    async def catch_up(
        self, log: Log, shard: ShardReplica, until: SeqNum, *, is_in_session: bool = False
    ) -> None:
        """Apply the records of a shard below `until`, as far as no other coroutine does.

        Args:
            log: read from it.
            shard: which one.
            until: where to stop; what the same page brings beyond it is applied, too.
            is_in_session: this `log` has had an answer from `until` or beyond. Otherwise `until`
                may come from another session, and nothing found is asked again of all.
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
        """Read page after page; a short one proves nothing, as pages are cut by bytes, too."""
        tag, ask_all = self.tags.shards[shard.number], False
        while shard.known < until:
            try:
                page = await log.read_range(tag, shard.fold.end, limit=_PAGE, fresh=ask_all)
            except TrimmedError as error:
                # A floor can be seen ahead of the checkpoint that was appended before it rose.
                await log.tail()
                lost = await self._load(log, shard)
                if shard.fold.end < error.first_seqnum:
                    if lost is not None:
                        raise self._named(shard, lost) from error
                    raise QueueTrimmedError(self._name, error.first_seqnum) from error
                continue
            except DataLossError as error:
                raise self._named(shard, error) from error
            for record in page:
                self.clock.read(record.ordered_at)
                shard.apply(record, self._contents)
            self.news.due(self._due_in_s(shard))
            if not page and (is_in_session or ask_all):
                shard.seen = until
            ask_all = not page

    def _named(self, shard: ShardReplica, error: DataLossError) -> DataLossError:
        return name_loss(f"Shard {shard.number} of queue {self._name!r}", error)

    async def data(self, log: Log, seqnum: SeqNum) -> bytes:
        """Return the bytes of an outstanding message."""
        if (data := self._contents.take(seqnum)) is not None:
            return data
        try:
            record = await log.read(seqnum)
        except TrimmedError as error:
            raise QueueTrimmedError(self._name, error.first_seqnum) from error
        push = None if record is None else command_decoded(record.data)
        if not isinstance(push, PushMessage):
            raise QueueError(f"The message at seqnum {seqnum} cannot be read.")
        return push.data

    def due_in_s(self) -> float | None:
        """Return in how many seconds the next lease or delay of any shard ends."""
        dues = (due for s in self.shards if (due := self._due_in_s(s)) is not None)
        return min(dues, default=None)

    def _due_in_s(self, shard: ShardReplica) -> float | None:
        due = shard.fold.next_due()
        return None if due is None else max(due, shard.rests_until) - self.clock.now()

    # --- claims

    async def next_available(self, log: Log) -> ShardReplica | None:
        """Return a shard in which a claim may find something now, each in its turn.

        While there is work anyway, news of other shards are looked for now and then only.
        """
        self._claims_since_look += 1
        if self._claims_since_look <= _CLAIMS_PER_LOOK:
            shard = self._in_turn(lambda one: one.available(self._log_time(one)))
            if shard is not None:
                return shard
        self._claims_since_look = 0
        while True:
            has_news = await self._look(log)
            shard = self._in_turn(lambda one: one.available(self._log_time(one)))
            if shard is not None or not has_news:
                return shard

    def _in_turn(self, wanted: Callable[[ShardReplica], bool]) -> ShardReplica | None:
        shards = self.shards
        for step in range(len(shards)):
            shard = shards[(self._turn + step) % len(shards)]
            if wanted(shard):
                self._turn = (shard.number + 1) % len(shards)
                return shard
        return None

    def _log_time(self, shard: ShardReplica) -> float:
        """Return what time it is for the leases and delays of a shard. The estimate only says when
        it is worth while to claim; what is over is decided when records were ordered.
        """
        log_time = self.clock.now()
        return log_time if log_time >= shard.rests_until else shard.fold.clock

    async def claim(
        self, log: Log, shard: ShardReplica, lease_s: float
    ) -> tuple[SeqNum, SeqNum] | None:
        """Claim a message; return the seqnums of the claim and of the message, None: none."""
        if not shard.has_unclaimed(self._log_time(shard)):
            await self.catch_up(log, shard, shard.news)
            if not shard.has_unclaimed(self._log_time(shard)):
                return None
        decided = Event()
        shard.claims.append(decided)
        try:
            claim = await self.tell(log, shard, encoded(Claim(1, lease_s)))
        except BaseException:
            self._claims_failed += 1
            raise
        finally:
            shard.claims.remove(decided)
            decided.set()
        got = shard.claimed(claim)
        if not got:
            await self._rest_after_empty_claim(log, shard)
        return (claim, got[0]) if got else None

    async def _rest_after_empty_claim(self, log: Log, shard: ShardReplica) -> None:
        """Rest before the next claim for what seems due; it may seem so by a wrong estimate."""
        shard.rests_until = shard.fold.clock + _REST_S
        due = shard.fold.next_due()
        if due is not None and due <= self.clock.now():
            await self.clock.ask(log)

    async def has_failed_claims(self) -> bool:
        """Return when the claims of this process that are under way are decided: whether any of
        them failed, so that what it was meant for may be there still.
        """
        before = self._claims_failed
        for decided in [event for shard in self.shards for event in shard.claims]:
            await decided.wait()
        return self._claims_failed > before

    async def tell(
        self, log: Log, shard: ShardReplica, command: bytes, *, wakes: bool = False
    ) -> SeqNum:
        """Append a command and catch up with it; `wakes`: it can make messages ready.

        Raises:
            AppendOutcomeUnknownError: as `Log.append`; or it was appended, and what it came to
                cannot be read now.
        """
        tags = [self.tags.shards[shard.number]]
        if wakes:
            tags.append(self.tags.pushed)
        seqnum = await log.append(command, tags=tags)
        with append_outcome_unknown(seqnum):
            await self.catch_up(log, shard, seqnum + 1)
            check_own_append(seqnum, shard.fold.end)
        return seqnum

    # --- checkpoints

    async def save(self, log: Log, shard: ShardReplica) -> None:
        """After many records, write a checkpoint and trim what no replica needs any more.

        Processes that do it at the same time do no harm: each checkpoint is true, and what is
        trimmed is decided by the one that is furthest on, which stays. It raises nothing of the
        log: what was asked for has taken effect, and the next checkpoint makes up for this one.
        """
        if shard.unsaved >= max(CHECKPOINT_EVERY, shard.fold.kept // _MESSAGES_PER_RECORD):
            shard.unsaved = 0
            with suppress(IndilogError):
                await self._save(log, shard)

    async def _save(self, log: Log, shard: ShardReplica) -> None:
        tag = self.tags.checkpoints[shard.number]
        await write(log, tag, shard.fold.checkpoint())
        kept, lost = await find_furthest(log, tag)
        if lost is not None:
            return  # it may come back, and be further on
        if kept is None:
            return  # another process has trimmed it already, below one that is further on
        await log.trim(kept.seqnum, tag=tag)
        needed = min(kept.needed_from, shard.recent)
        await log.trim(needed, tag=self.tags.shards[shard.number])
        await log.trim(min(map(self._pushed_needed_from, self.shards)), tag=self.tags.pushed)

    def _pushed_needed_from(self, shard: ShardReplica) -> SeqNum:
        """Return the first notification of a shard that is needed. A shard that is not in use
        needs none: all that was pushed below the cursor is known.
        """
        if shard.fold.kept or shard.stale:
            return shard.fold.needed_from
        return max(shard.known, self._cursor)


_REPLICAS: Final[WeakKeyDictionary[object, dict[tuple[str, str, int], QueueReplica]]] = (
    WeakKeyDictionary()
)
_QUEUES_MAX: Final = 1024
"""Queues of one platform that a process keeps in memory; the one opened first goes first."""


def replica_of(log: Log, name: str, shards: int) -> QueueReplica:
    """Return the copy that all of a platform in this process share (`Log.scope`)."""
    replicas = _REPLICAS.setdefault(log.scope, {})
    key = (log.name, name, shards)
    if key not in replicas:
        if len(replicas) >= _QUEUES_MAX:
            del replicas[next(iter(replicas))]
        replicas[key] = QueueReplica(name, shards)
    return replicas[key]
