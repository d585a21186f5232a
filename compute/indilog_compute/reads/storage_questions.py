"""Chooses the replicas that a compute node asks for records (ARCHITECTURE 9).

The node asks one replica of each shard. If this replica is slow, it also asks a second one
(`indilog_compute.reads.hedging`). Replicas that do not answer are asked after all others
(`indilog_compute.reads.silent_nodes`). `Reads` calls `StorageQuestions` after it knows the seqnums
of a read.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from indilog.base.errors import DataLossError, NotReadyError
from indilog.base.ids import Instant, NodeId, SeqNum, ShardId, UserTag, decode_names, log_tag
from indilog.config import NodeConfig
from indilog.kernel.metalog import MetalogReplay
from indilog.kernel.placement import Placement
from indilog.roles.role import Effect, Send
from indilog.wire.messages import ReadRecords, RecordsRead
from indilog_compute.reads.hedging import Hedges
from indilog_compute.reads.operation import Asked, Operation
from indilog_compute.reads.silent_nodes import SilentNodes


class StorageQuestions:
    """Asks storage for the records of operations.

    Attributes:
        hedges: decides which attempts are also sent to a second replica.
        silent: the replicas that did not answer in time.
    """

    def __init__(self, node: NodeId, placement: Placement, config: NodeConfig) -> None:
        self._node = node
        self._placement = placement
        self.hedges = Hedges(
            share_max=config.reads.hedged_reads_share_max,
            delay_s_min=config.reads.hedge_delay_s_min,
            delay_s_max=config.reads.lookup_timeout_s,
        )
        self.silent = SilentNodes(config.reads.lookup_timeout_s)

    def choose(
        self,
        operation: Operation,
        missing: Mapping[ShardId, Sequence[SeqNum]],
        rotation: int,
        now: Instant,
    ) -> DataLossError | NotReadyError | None:
        """Choose for each shard a replica that may have the shard's first missing record.

        `ask` requests all missing records that the replica may have. A replica may lack some
        records and have others. Its last answer may have left out records that it has, because an
        answer is limited in bytes.

        If no replica has the first missing record of the operation, an error is returned. If a
        shard has only later records of the operation, and no replica has the first missing one of
        them, this shard is not asked: the page can end before that record.

        Args:
            operation: a read of records at known seqnums.
            missing: the missing records of each shard, in the order of the operation; not empty.
            rotation: selects the first candidate (`SilentNodes.pick`).
            now: the time now.
        """
        asked: dict[ShardId, Asked] = {}
        firsts = {seqnums[0] for seqnums in missing.values()}
        first = next((seqnum for seqnum in operation.seqnums if seqnum in firsts), None)
        for shard, seqnums in missing.items():
            replicas = self._left(operation, shard, seqnums[:1])
            if not replicas and first not in (None, seqnums[0]):
                continue
            if not replicas:
                if seqnums[0] in operation.away:
                    return NotReadyError(
                        f"Cold storage, which has the record at seqnum {seqnums[0]}, does not "
                        "answer; try again."
                    )
                return self._lost(operation, shard, seqnums)
            replica, _ = self.silent.pick(replicas, rotation, now)
            wanted = tuple(s for s in seqnums if (replica, s) not in operation.denied)
            asked[shard] = Asked((replica,), wanted)
        operation.asked = asked
        return None

    def ask(
        self, operation: Operation, request: int, replay: MetalogReplay, now: Instant
    ) -> list[Effect]:
        """Ask the chosen replicas."""
        operation.asked_at = now
        if any(
            len(self._left(operation, shard, asked.seqnums)) > 1
            for shard, asked in operation.asked.items()
        ):
            self.hedges.note_sent(request, now)
        return [
            Send(replicas[0], self._wanted(request, shard, seqnums, replay))
            for shard, (replicas, seqnums) in operation.asked.items()
        ]

    def _wanted(
        self, request: int, shard: ShardId, seqnums: tuple[SeqNum, ...], replay: MetalogReplay
    ) -> ReadRecords:
        return ReadRecords(request, self._node, shard, seqnums, replay.trims, replay.last)

    def hedge(
        self, requests: Mapping[int, Operation], replay: MetalogReplay, now: Instant
    ) -> list[Effect]:
        """Ask a second replica for the records of attempts that take longer than usual."""
        effects: list[Effect] = []
        for request in self.hedges.due(now, requests):
            operation = requests[request]
            for shard, (replicas, seqnums) in list(operation.asked.items()):
                left = [r for r in self._left(operation, shard, seqnums) if r not in replicas]
                if left:
                    further, _ = self.silent.pick(left, request, now)
                    operation.asked[shard] = Asked((*replicas, further), seqnums)
                    effects.append(Send(further, self._wanted(request, shard, seqnums, replay)))
        return effects

    def timed_out(self, operation: Operation, now: Instant) -> None:
        """Note that the asked replicas of an operation did not answer in time."""
        for replicas, _ in operation.asked.values():
            self.silent.timed_out(replicas, operation.asked_at, now)

    def refusal(self, sender: NodeId, operation: Operation, message: RecordsRead) -> str | None:
        """Return why an answer is ignored; None: it is not ignored."""
        if sender not in self._placement.replicas(message.shard):
            return "records from a node that does not keep their shard"
        return operation.contradicted_by(message)

    def _left(
        self, operation: Operation, shard: ShardId, seqnums: Sequence[SeqNum]
    ) -> list[NodeId]:
        """Return the replicas of `shard` that have reported none of `seqnums` as unknown."""
        replicas, denied = self._placement.replicas(shard), operation.denied
        if not denied:
            return list(replicas)
        return [r for r in replicas if all((r, s) not in denied for s in seqnums)]

    def _lost(
        self, operation: Operation, shard: ShardId, missing: Sequence[SeqNum]
    ) -> DataLossError:
        """Return the error for the first missing record, and for the lost records directly after
        it.

        The range of the error ends before the next record that a replica may have, or cold storage
        that does not answer. A caller that continues there gets another error for later lost
        records.
        """
        first = missing[0]
        wanted = frozenset(missing)
        lost = [first]
        behind = itertools.dropwhile(lambda seqnum: seqnum != first, operation.seqnums)
        for seqnum in itertools.islice(behind, 1, None):
            if seqnum not in wanted or seqnum in operation.away:
                break
            if self._left(operation, shard, (seqnum,)):
                break
            lost.append(seqnum)
        last = max(lost)
        which = f"seqnum {first}" if first == last else f"seqnums {first} to {last}"
        return DataLossError(
            f"No replica of shard {shard} holds {which}: lost by damage. Read on from seqnum "
            f"{last + 1}, or backwards from below {first}.",
            seqnum=first,
            next_seqnum=last + 1,
            tags=_tags_of(lost, operation),
        )


def _tags_of(lost: Sequence[SeqNum], operation: Operation) -> list[UserTag]:
    """Return the tags of lost records. The result is empty if a record's names are unknown, or if a
    record belongs to another log than the one that is read.
    """
    known: dict[UserTag, None] = {}
    for seqnum in lost:
        if (names := operation.names.get(seqnum)) is None:
            return []
        log, tags = decode_names(names)
        if log_tag(log) != operation.log:
            return []
        known.update(dict.fromkeys(tags))
    return list(known)
