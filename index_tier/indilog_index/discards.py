"""Lets an index node find out which records storage has discarded (ARCHITECTURE 13).

A record is dead below the floor of its log, or below the floors of all its tags. An index node
knows all floors, but not which tags a record has, because it stores the records of each tag in a
column. Storage nodes read the records, and discard a batch when all its records are dead. So an
index node asks storage nodes which records of its index were discarded, and drops these records.
The node asks when two conditions hold since the last question: trims have happened, and the index
has grown by an eighth. Each question is about a bounded number of runs of one shard.

`IndexNode` owns the one `DiscardQuestions`.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from indilog.base.ids import Epoch, Instant, NodeId, SeqNum, ShardId
from indilog.base.resend import Resend
from indilog.config import NodeConfig
from indilog.kernel.placement import Placement
from indilog.roles.role import Ignore, Send
from indilog.wire.tag_messages import DISCARDED_RUNS_MAX, Discarded, DiscardedWanted
from indilog_index.trim_feed import TrimFeed

Runs: TypeAlias = NDArray[np.uint64]
"""Runs of seqnums, ascending: each row is a range [first, end)."""


class _Question(NamedTuple):
    shard: ShardId
    runs: Runs
    """Runs that are not answered yet."""
    attempt: int


class DiscardQuestions:
    """Asks storage about all records in the index, one question at a time.

    Attributes:
        records: number of discarded records that this incarnation has found.
    """

    def __init__(self, placement: Placement, floors: TrimFeed, config: NodeConfig) -> None:
        self._placement = placement
        self._floors = floors
        self._resend = Resend(config.messages.resend_s, config.messages.resend_s_max)
        self._entries_min = config.index_tier.index_forget_entries_min
        self._entries = 0
        """Number of entries of the index when storage was last asked."""
        self._trims = 0
        """Number of known trims when storage was last asked."""
        self._todo: deque[_Question] = deque()
        """Unanswered questions; the first one is in flight."""
        self._found: list[Runs] = []
        self.records = 0

    @property
    def asking(self) -> bool:
        """Whether an answer is outstanding."""
        return bool(self._todo)

    def is_worth_it(self, entries: int) -> bool:
        """Whether an index with `entries` entries may have many discarded records."""
        grown = entries - self._entries >= max(self._entries_min, self._entries // 8)
        return grown and self._floors.trims > self._trims and not self.asking

    def begin(self, entries: int, runs: dict[ShardId, Runs], now: Instant) -> list[Send]:
        """Ask about all records of the index, which `runs` names."""
        assert not self._todo, "one question at a time"
        assert not self._found
        self._entries, self._trims = entries, self._floors.trims
        self._todo.extend(_Question(shard, of_shard, 0) for shard, of_shard in runs.items())
        return self._ask(now)

    def note_entries(self, entries: int) -> None:
        """Note how many entries are left after a sweep."""
        self._entries = min(self._entries, entries)

    def stop(self) -> None:
        """Drop all questions, because the index is rebuilt."""
        self._todo.clear()
        self._found.clear()
        self._resend.stop()
        self._entries = 0

    def on_answer(
        self, sender: NodeId, answer: Discarded, copy_of: Epoch, now: Instant
    ) -> tuple[Runs | None, list[Send | Ignore]]:
        """Handle an answer; return the next question, and after the last answer the discarded runs.

        `copy_of`: the incarnation of the primary whose metalog the index follows. In the metalog of
        another incarnation, a seqnum may name another record. An answer that depends on trims
        unknown here is ignored. Otherwise lookups would report its records as absent instead of
        trimmed.
        """
        if not self._todo or self._replica(self._todo[0]) != sender:
            return None, []
        shard, runs, _ = question = self._todo[0]
        found = np.frombuffer(answer.runs, np.uint64)
        if answer.shard != shard or len(found) % 2 or not _ascending(found):
            return None, [Ignore(answer, "an answer about other records than were asked about")]
        if answer.end <= runs[0, 0]:
            return None, []  # it answers an earlier page of the same question
        if answer.copy_of != copy_of or not self._floors.known.covers(answer.trims, answer.copy_of):
            return None, []  # resent after a pause
        self._resend.stop()
        self._found.append(_within(found.reshape(-1, 2), runs[:DISCARDED_RUNS_MAX]))
        left = runs[runs[:, 1] > np.uint64(answer.end)].copy()
        left[:, 0] = np.maximum(left[:, 0], np.uint64(answer.end))
        if len(left):
            self._todo[0] = question._replace(runs=left, attempt=0)
            return None, [*self._ask(now)]
        self._todo.popleft()
        return self._conclude(), [*self._ask(now)]

    def _conclude(self) -> Runs | None:
        if self._todo:
            return None
        found = np.concatenate([*self._found, np.empty((0, 2), np.uint64)])
        self._found.clear()
        self.records += int((found[:, 1] - found[:, 0]).sum())
        return found[np.argsort(found[:, 0])]

    def on_time(self, now: Instant) -> tuple[Runs | None, list[Send]]:
        """Ask another replica if the asked replica does not answer. If no replica answers, skip the
        shard.
        """
        if not self._resend.is_due(now):
            return None, []
        question = self._todo[0]._replace(attempt=self._todo[0].attempt + 1)
        if question.attempt < len(self._placement.replicas(question.shard)):
            self._todo[0] = question
            return None, self._ask(now)
        self._todo.popleft()
        self._resend.stop()
        return self._conclude(), self._ask(now)

    def deadline(self) -> Instant | None:
        """When to ask another replica."""
        return self._resend.due

    def _ask(self, now: Instant) -> list[Send]:
        if not self._todo:
            return []
        self._resend.sent(now)
        shard, runs, _ = question = self._todo[0]
        replica = self._replica(question)
        assert replica is not None, "only records of known shards are indexed"
        return [Send(replica, DiscardedWanted(shard, runs[:DISCARDED_RUNS_MAX].tobytes()))]

    def _replica(self, question: _Question) -> NodeId | None:
        replicas = self._placement.replicas(question.shard)
        return replicas[question.attempt % len(replicas)] if replicas else None


def _ascending(bounds: NDArray[np.uint64]) -> bool:
    return bool((bounds[1:] >= bounds[:-1]).all())


def _within(found: Runs, asked: Runs) -> Runs:
    """Return those runs of `found` that lie in runs of `asked`."""
    if not len(found):
        return found
    places = np.searchsorted(asked[:, 0], found[:, 0], side="right").astype(np.int64) - 1
    inside = (places >= 0) & (found[:, 1] <= asked[np.maximum(places, 0), 1])
    chosen: Runs = found[inside]
    return chosen


def seqnums_in(runs: Runs, start: SeqNum, end: SeqNum) -> NDArray[np.uint64]:
    """Return the seqnums of `runs` that are in [start, end), ascending."""
    firsts = np.maximum(runs[:, 0], np.uint64(start)).astype(np.int64)
    ends = np.minimum(runs[:, 1], np.uint64(end)).astype(np.int64)
    lengths = np.maximum(ends - firsts, 0)
    offsets = np.cumsum(lengths) - lengths
    return (np.repeat(firsts - offsets, lengths) + np.arange(int(lengths.sum()))).astype(np.uint64)
