"""The reads of a compute node that could not be answered at once (ARCHITECTURE 9, thesis 5.4).

`LocalReads` answers a read at once if the local index proves the answer and the record cache has
the record. `Engine` passes all other reads to `Reads`, which proceeds in one of four ways:

- Hit: the local index finds the seqnum. `Reads` asks a replica of its shard (read type 1).
- Miss: `Reads` asks one replica of every index shard about the log below one `limit`. A single
  match is sent by storage (read types 2 and 3). A page, or the answer that there is no match, is
  sent by the aggregator.
- The session's position is not applied here: the read waits for it, and then proceeds.
- The read is fresh: `Reads` asks the primary which position is committed. The read then waits for
  this position.

Every attempt has its own request number, so a late answer to an earlier attempt is ignored. An
attempt that takes longer than `lookup_timeout_s` is repeated with other replicas. A read that takes
longer than `read_timeout_s` fails with a retryable error.

The answer "unknown" of one replica never means "absent": the next replica is asked. If all replicas
answer "unknown", the record is lost. A read whose records lie below the floor of the log or tag
fails with `TrimmedError`. A read of a whole log skips a record whose tags are all trimmed
(ARCHITECTURE 13).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import assert_never

from indilog.base.errors import (
    IndilogError,
    OverloadedError,
    QuorumUnavailableError,
    TrimmedError,
)
from indilog.base.ids import EMPTY_TAG, Instant, NodeId, SeqNum, ShardId
from indilog.base.log import Record
from indilog.base.resend import Resend
from indilog.config import Config
from indilog.kernel.metalog import MetalogReplay
from indilog.kernel.placement import Placement
from indilog.roles.leadership import Leadership
from indilog.roles.role import Answer, Effect, Ignore, Send
from indilog.wire.messages import (
    Direction,
    LookupResult,
    RecordsRead,
    TailIs,
    TailWanted,
)
from indilog.wire.tag_messages import TagFirsts
from indilog_compute.local_index import Empty, Found, LocalIndex, Matches, Miss
from indilog_compute.reads.local_reads import LocalReads
from indilog_compute.reads.log_floors import LogFloors
from indilog_compute.reads.lookup_routes import LookupRoutes
from indilog_compute.reads.operation import Operation, Stage, Tail
from indilog_compute.reads.parked_reads import ParkedReads
from indilog_compute.reads.record_cache import RecordCache
from indilog_compute.reads.storage_questions import StorageQuestions
from indilog_compute.reads.tag_questions import TagQuestions
from indilog_compute.reads.tail_questions import TailQuestions
from indilog_compute.reads.tier_lookups import TierLookups


class Reads:
    """All reads of one compute node that are in flight.

    `start` only enqueues a read; `begin` processes it in the same iteration. The local index and
    the replay belong to the engine, which applies metalog entries and index data to them.
    """

    def __init__(
        self,
        node: NodeId,
        placement: Placement,
        config: Config,
        cache: RecordCache,
        floors: LogFloors,
        leadership: Leadership,
    ) -> None:
        self._node = node
        self._leadership = leadership
        self._placement = placement
        self._config = config.node
        self._cache = cache
        self._floors = floors
        self._local_reads = LocalReads(cache, floors)
        self._local: LocalIndex | None = None
        self._replay = MetalogReplay()
        self._starting: list[Operation] = []
        self._parked = ParkedReads(config.node.reads.read_timeout_s)
        self._requests: OrderedDict[int, Operation] = OrderedDict()
        self._next_request = 0
        self._now = Instant(0.0)
        self._storage = StorageQuestions(node, placement, config.node)
        self._tails = TailQuestions(
            Resend(config.node.messages.resend_s, config.node.messages.resend_s_max)
        )
        routes = LookupRoutes(
            placement, config.cluster.aggregation, pause_s=config.node.reads.lookup_timeout_s
        )
        self._tier = TierLookups(cache, routes)
        self.questions = TagQuestions(config.node, routes, self._number)
        """Questions to the index tier whose answers let the local index answer later reads."""

    def number_from(self, request: int) -> None:
        """Number attempts above `request`, so no answer to an earlier incarnation matches one."""
        self._next_request = request

    @property
    def last_request(self) -> int:
        """The number of the newest attempt."""
        return self._next_request

    @property
    def parked(self) -> bool:
        """Whether reads wait for a position that is not applied yet."""
        return bool(self._parked)

    @property
    def pending(self) -> int:
        """Number of reads in flight."""
        waiting = len(self._starting) + len(self._parked) + len(self._tails)
        return waiting + len(self._requests)

    @property
    def is_waiting(self) -> bool:
        """Whether any read is in flight; cheaper than `pending`, for a node that only appends."""
        return bool(self._starting or self._requests or self._parked or self._tails)

    @property
    def hedged(self) -> int:
        """Number of attempts for which a second replica was asked."""
        return self._storage.hedges.hedged

    def begin_iteration(self, now: Instant) -> None:
        """Set the time that applies to all messages of this iteration of the event loop."""
        self._now = now

    def joined(self, local: LocalIndex, replay: MetalogReplay) -> None:
        """Use the engine's index and replay from now on; reads waited for this call."""
        self._local, self._replay = local, replay
        self.questions.joined(local, replay)

    def start(self, operation: Operation) -> None:
        """Accept an operation; `begin` processes it when the engine's iteration ends.

        Raises:
            OverloadedError: too many reads wait already.
        """
        if self.pending >= self._config.reads.lookups_pending_max:
            raise OverloadedError(f"{self.pending:,} reads wait for an answer; try again later.")
        self._starting.append(operation)

    def begin(self, now: Instant) -> list[Effect]:
        """Process the operations that were started since the last call; send due questions."""
        effects: list[Effect] = []
        while self._starting:
            operation = self._starting[0]
            operation.created = now
            effects += self._decide(operation, now)
            del self._starting[0]
        return effects + self.questions.begin(now) + self._ask_for_tail(now)

    def status(self) -> dict[str, dict[str, int]]:
        """Return the status for operators: the numbers of questions to the index tier, and of its
        answers by outcome.
        """
        return {"index_tier": dict(self._tier.counters), "tag_questions": self.questions.status()}

    def advanced(self, now: Instant) -> list[Effect]:
        """Process the parked operations whose position is applied now."""
        if not self._parked or self._local is None:
            return []
        ready = self._parked.take_reached(self._local.tag_position)
        return [effect for operation in ready for effect in self._decide(operation, now)]

    def abandon(self, error: IndilogError) -> list[Effect]:
        """Fail every read."""
        parked, asking = self._parked.clear(), self._tails.clear()
        waiting = (*self._starting, *parked, *self._requests.values(), *asking)
        operations = list(dict.fromkeys(waiting))
        self._starting.clear()
        self._requests.clear()
        self._storage.hedges.clear()
        return [self._fail(operation, error) for operation in operations]

    # --- deciding

    def _decide(self, operation: Operation, now: Instant) -> list[Effect]:
        operation.started = now
        if operation.stage is Stage.TAIL:
            self._tails.add(operation)
            return []
        local = self._local
        if local is None or operation.position > local.tag_position:
            self._parked.add(operation)
            return []
        # The Suffix answers lookups of the empty tag, and is ahead of the Tag Cache.
        whole = operation.tag == EMPTY_TAG
        operation.reflects = self._replay.position if whole else local.tag_position
        try:
            if operation.page:
                return self._decide_page(operation, local)
            return self._decide_one(operation, local)
        except TrimmedError as error:
            if operation.bound < error.first_seqnum:
                operation.reflects = self._replay.position  # floors of logs are ahead of tags
            return [operation.answer(error)]

    def _decide_one(self, operation: Operation, local: LocalIndex) -> list[Effect]:
        find = local.find_next if operation.direction is Direction.NEXT else local.find_prev
        answer = find(operation.tag, operation.bound)
        match answer:
            case Found(seqnum, shard):
                if self._permitted(operation, seqnum):
                    return self._collect(operation, (seqnum,), (shard,))
            case Empty():
                if self._permitted(operation, None):
                    return [operation.answer(None)]
            case Miss():
                if self._permitted(operation, operation.bound):
                    return self._try_bound(operation, local) or self._look_up(operation)
            case unreachable:
                assert_never(unreachable)
        return self._look_up(operation)

    def _permitted(self, how: Operation, found: SeqNum | None) -> bool:
        return self._floors.permit(how.direction, how.tag, how.log, how.bound, found)

    def _decide_page(self, operation: Operation, local: LocalIndex) -> list[Effect]:
        if not self._permitted(operation, operation.bound):
            return self._look_up(operation)
        match local.find_range(operation.tag, operation.bound, operation.count):
            case Miss():
                return self._look_up(operation)
            case Matches(seqnums, shards) if seqnums:
                return self._collect(operation, seqnums, shards)
            case Matches():
                return [operation.answer([])]
            case unreachable:
                assert_never(unreachable)

    def _try_bound(self, operation: Operation, local: LocalIndex) -> list[Effect]:
        """Try the record at the bound, from the cache or from storage, before the index tier is
        asked. No effects: this record cannot be tried.
        """
        record = self._tier.at_bound(operation, self._replay.tail)
        if record is None or self._may_be_trimmed(operation, record):
            return self._probe(operation, local)
        self._tier.note_cached()
        operation.reflects = self._replay.position
        return [operation.answer(record)]

    def _may_be_trimmed(self, operation: Operation, record: Record) -> bool:
        if operation.whole:
            return self._floors.may_be_dead(record.seqnum, record.names)
        return self._floors.may_be_trimmed(record.seqnum, operation.tag)

    def _probe(self, operation: Operation, local: LocalIndex) -> list[Effect]:
        """Ask storage for the record at the bound, because that record often belongs to the log
        that is read.
        """
        if operation.log_names is None or operation.probed:
            return []
        operation.probed = True
        shard = local.shard_of(operation.bound)
        if shard is None:
            return []
        operation.stage = Stage.PROBE
        operation.reflects = self._replay.position
        return self._ask_storage(operation, {shard: [operation.bound]})

    def _look_up(self, operation: Operation) -> list[Effect]:
        self.questions.missed(operation.tag)
        request = self._request(operation)
        return self._tier.ask(operation, request, self._replay, self._local)

    def _collect_learned(
        self, operation: Operation, seqnums: Sequence[SeqNum], shards: Sequence[ShardId]
    ) -> list[Effect]:
        if self._local is not None:
            for seqnum, shard in zip(seqnums, shards, strict=True):
                self._local.learn(seqnum, shard)
        return self._collect(operation, seqnums, shards)

    def _collect(
        self, operation: Operation, seqnums: Sequence[SeqNum], shards: Sequence[ShardId]
    ) -> list[Effect]:
        """Take the records at `seqnums` from the cache, and request the others from storage."""
        if operation.bound_is_trimmed(seqnums[0]):
            return [operation.answer(TrimmedError(seqnums[0]))]
        assert len(seqnums) == len(shards) <= operation.count, "each record has a shard"
        operation.stage = Stage.RECORDS
        operation.seqnums, operation.shards = seqnums, shards
        missing: dict[ShardId, list[SeqNum]] = {}
        for seqnum, shard in zip(seqnums, shards, strict=True):
            if seqnum in operation.records:
                continue
            record = self._local_reads.cached(operation.tag, operation.log, seqnum)
            if record is not None:
                operation.records[seqnum] = record
            else:
                missing.setdefault(shard, []).append(seqnum)
        if not missing:
            return [operation.answer(operation.gathered(self._config.messages.page_bytes_max))]
        return self._ask_storage(operation, missing)

    def _ask_storage(
        self, operation: Operation, missing: Mapping[ShardId, Sequence[SeqNum]]
    ) -> list[Effect]:
        """Ask one replica of each shard for the missing records.

        If no replica has the first missing record, the read fails, or its page ends before that
        record.
        """
        # Each question of a read goes to another replica. Consecutive reads also use different
        # replicas.
        operation.rotation = (
            self._next_request + 1 if operation.rotation is None else operation.rotation + 1
        )
        lost = self._storage.choose(operation, missing, operation.rotation, self._now)
        if lost is not None:
            if operation.page and operation.has_first:
                return [operation.answer(operation.gathered(self._config.messages.page_bytes_max))]
            return [self._fail(operation, lost)]
        return self._storage.ask(operation, self._request(operation), self._replay, self._now)

    def _ask_for_tail(self, now: Instant) -> list[Effect]:
        if not self._tails.is_due(now):
            return []
        request = self._tails.asked(self._number(), now)
        wanted = TailWanted(request, self._placement.view.number)
        return [Send(self._leadership.primary, wanted)]

    def _number(self) -> int:
        self._next_request += 1
        return self._next_request

    def _request(self, operation: Operation) -> int:
        request = self._number()
        self._requests[request] = operation
        return request

    def begin_term(self, now: Instant) -> None:
        """Ask again for tails, because another node is the primary."""
        self._tails.make_due(now)

    # --- answers

    def on_message(
        self, sender: NodeId, message: RecordsRead | LookupResult | TagFirsts, now: Instant
    ) -> list[Effect]:
        """Handle an answer of storage or of the index tier."""
        match message:
            case RecordsRead():
                return self._on_records(sender, message, now)
            case LookupResult():
                return self._on_result(message, now)
            case TagFirsts():
                return self.questions.on_firsts(sender, message)
            case unreachable:
                assert_never(unreachable)

    def _on_records(self, sender: NodeId, message: RecordsRead, now: Instant) -> list[Effect]:
        """Handle records from storage; ignore a late answer to an earlier attempt."""
        self._storage.silent.answered(sender)
        operation = self._requests.get(message.request)
        if operation is None:
            return []
        if (reason := self._storage.refusal(sender, operation, message)) is not None:
            return [Ignore(message, reason)]
        if message.trimmed and operation.reflects < message.position:
            # This node knows the trim and its floor only after it has applied `message.position`.
            del self._requests[message.request]
            operation.position = max(operation.position, message.position)
            operation.restart()
            return self._decide(operation, now)
        return self._on_records_wanted(operation, sender, message, now)

    def _on_records_wanted(
        self, operation: Operation, sender: NodeId, message: RecordsRead, now: Instant
    ) -> list[Effect]:
        records = self._records_of(operation, message)
        if message.unknown:
            if message.since == self._placement.since(message.shard):
                operation.denied.update((sender, seqnum) for seqnum in message.unknown)
            operation.names.update(message.names)
            operation.away.update(message.away)
            operation.records.update({r.seqnum: r for r in records})
            if operation.may_still_answer(message.shard):
                return []
        elif operation.asked:
            self._storage.hedges.note_duration(now - operation.asked_at)
        match operation.stage:
            case Stage.PROBE:
                del self._requests[message.request]
                return self._on_probed(operation, records, now)
            case Stage.LOOKUP:
                return self._on_looked_up(operation, message, records, now)
            case Stage.RECORDS:
                return self._on_fetched(operation, message, records, now)
            case Stage.POSITION | Stage.TAIL:
                raise AssertionError("such an operation is not waiting for records")
            case unreachable:
                assert_never(unreachable)

    def note_moved(self) -> None:
        """Allow questions to all replicas again, because shards have other replicas now."""
        for operation in self._requests.values():
            operation.denied.clear()
        self._tier.routes.note_view()

    def _records_of(self, operation: Operation, message: RecordsRead) -> list[Record]:
        if operation.stage is Stage.LOOKUP:
            self._tier.note_match(
                operation, operation.match_in(message), message.shard, self._local
            )
        return [self._cache.take_in(stored) for stored in message.records]

    def _on_probed(self, operation: Operation, records: list[Record], now: Instant) -> list[Effect]:
        prefix = operation.log_names
        assert prefix is not None
        for record in records:
            if record.names == prefix or record.names.startswith(prefix + b"\x1f"):
                return [operation.answer(record)]
        operation.denied.clear()
        return self._decide(operation, now)

    def _on_looked_up(
        self, operation: Operation, message: RecordsRead, records: list[Record], now: Instant
    ) -> list[Effect]:
        seqnums = tuple(r.seqnum for r in records) or message.unknown or message.trimmed
        del self._requests[message.request]
        if seqnums[0] != operation.bound and operation.route is not None:
            self._tier.routes.answered(
                operation.route
            )  # at the bound, only one index shard has answered
        if message.trimmed and not operation.bound_is_trimmed(seqnums[0]):
            return self._skip(operation, message.trimmed[-1], now)
        operation.records.update({r.seqnum: r for r in records})
        return self._collect_learned(operation, seqnums, (message.shard,) * len(seqnums))

    def _skip(self, operation: Operation, seqnum: SeqNum, now: Instant) -> list[Effect]:
        """A read of a whole log continues after the trimmed record at `seqnum`; any other read is
        answered with `TrimmedError`.
        """
        if not operation.whole or operation.tag == EMPTY_TAG:
            return [operation.answer(TrimmedError(seqnum + 1))]
        if operation.skip_dead(seqnum):
            return self._decide(operation, now)
        return [operation.answer(None)]

    def _on_fetched(
        self, operation: Operation, message: RecordsRead, records: list[Record], now: Instant
    ) -> list[Effect]:
        operation.records.update({r.seqnum: r for r in records})
        operation.trimmed.update(message.trimmed)
        del operation.asked[message.shard]
        if operation.asked:
            return []
        del self._requests[message.request]
        if operation.trimmed:
            last = operation.seqnums[-1]
            operation.leave_out_trimmed()
            if not operation.seqnums:
                return self._skip(operation, last, now)
        first_missing = next((s for s in operation.seqnums if s not in operation.records), None)
        if first_missing is None or (operation.page and first_missing != operation.seqnums[0]):
            return [operation.answer(operation.gathered(self._config.messages.page_bytes_max))]
        return self._collect(operation, operation.seqnums, operation.shards)

    def _on_result(self, message: LookupResult, now: Instant) -> list[Effect]:
        """Handle the aggregator's result: no match, or the places of the matches."""
        if (effects := self.questions.on_result(message)) is not None:
            return effects
        operation = self._requests.get(message.request)
        if operation is None:
            return []
        if operation.stage is not Stage.LOOKUP:
            return [Ignore(message, "a result, while no lookup is under way")]
        if operation.lookup_contradicted_by(message):
            return [Ignore(message, "a result of another lookup than was asked for")]
        del self._requests[message.request]
        if operation.route is not None:
            self._tier.routes.answered(operation.route)
        if message.position <= self._replay.position:
            self._floors.learn(operation.log, message.log_floor)
        if not message.seqnums:
            return self._on_none(operation, message, now)
        self._tier.note_match(operation, message.seqnums[0], message.shards[0], self._local)
        return self._collect_learned(operation, message.seqnums, message.shards)

    def _on_none(self, operation: Operation, message: LookupResult, now: Instant) -> list[Effect]:
        if (lost := operation.lost_by(message)) is not None:
            return [self._fail(operation, lost)]
        value = operation.value_of_nothing(message.floor)
        if isinstance(value, TrimmedError):
            value = operation.trimmed_error(value, message.position)
            if value is None:
                operation.restart()
                return self._decide(operation, now)
        self._tier.note_no_match()
        return [operation.answer(value)]

    def on_tail(self, message: TailIs, now: Instant) -> list[Effect]:
        """Handle the primary's tail; fresh reads continue at the position in the answer."""
        effects: list[Effect] = []
        for operation in self._tails.take_answered(message.request):
            if operation.fresh:
                operation.stage = Stage.POSITION
                operation.position = max(operation.position, message.position)
                effects += self._decide(operation, now)
            else:
                operation.reflects = message.position
                effects.append(operation.answer(Tail(message.tail, message.time_us)))
        return effects + self._ask_for_tail(now)

    def _fail(self, operation: Operation, error: IndilogError) -> Effect:
        return Answer(operation.waiter, error)

    # --- time

    def deadline(self) -> Instant | None:
        """When the first attempt, parked read, question or hedge is due; None: nothing waits."""
        times: list[float] = []
        if self._requests:
            oldest = next(iter(self._requests.values()))
            times.append(oldest.started + self._config.reads.lookup_timeout_s)
        if (parked := self._parked.deadline()) is not None:
            times.append(parked)
        if (asking := self._tails.deadline(self._config.reads.read_timeout_s)) is not None:
            times.append(asking)
        if (hedging := self._storage.hedges.deadline(self._requests)) is not None:
            times.append(hedging)
        if (questions := self.questions.deadline()) is not None:
            times.append(questions)
        return Instant(min(times)) if times else None

    def on_time(self, now: Instant) -> list[Effect]:
        """Repeat overdue attempts with other nodes; fail reads that exceed `read_timeout_s`."""
        self.questions.on_time(now)
        effects: list[Effect] = []
        while self._requests:
            request, operation = next(iter(self._requests.items()))
            if operation.started + self._config.reads.lookup_timeout_s > now:
                break
            del self._requests[request]
            if operation.stage is not Stage.LOOKUP:
                self._storage.timed_out(operation, now)
            elif operation.route is not None:
                self._tier.routes.timed_out(operation.route, now)
            if now >= operation.created + self._config.reads.read_timeout_s:
                effects.append(self._fail(operation, self._unavailable()))
            else:
                effects += self._decide(operation, now)
        expired = self._parked.take_expired(now)
        expired += self._tails.take_expired(now, self._config.reads.read_timeout_s)
        effects += [self._fail(operation, self._unavailable()) for operation in expired]
        effects += self._storage.hedge(self._requests, self._replay, now)
        return effects + self._ask_for_tail(now)

    def _unavailable(self) -> QuorumUnavailableError:
        return QuorumUnavailableError(
            f"The read found no answer within {self._config.reads.read_timeout_s:g} s; try again."
        )

    def check_invariants(self) -> None:
        """Assert the limit, and that each read waits in one place."""
        assert self.pending <= self._config.reads.lookups_pending_max, "more reads than allowed"
        assert all(request <= self._next_request for request in self._requests)
        waits = (Stage.LOOKUP, Stage.PROBE, Stage.RECORDS)
        assert all(operation.stage in waits for operation in self._requests.values())
        self._parked.check_invariants()
        self._tails.check_invariants()
        self._tier.routes.check_invariants()
        self.questions.check_invariants()
