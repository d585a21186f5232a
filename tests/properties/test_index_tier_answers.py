"""Late answers of the index tier to the Tag Cache and the Answer Cache, against a scan of the log.

A log of a few tags grows. The cache applies it position by position, and evicts and cuts under
small limits. One shard is written at the node of the cache, the others elsewhere. Questions are
asked: is the tag new, which are its newest records, which record is next. They are answered
correctly for the log below their limit. The answers arrive much later, in any order, twice or
never.

Every proven answer of the cache is exact at all bounds. Where there is room for everything, every
announced tag is fully known (thesis 5.7, PITFALLS A19).
"""

from __future__ import annotations

import copy
import random
from array import array
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indilog.base.ids import MAX_SEQNUM, ShardId
from indilog.roles import tags_sorted
from indilog.roles.tags_sorted import RowsByTag
from indilog.wire.messages import ShardTags
from indilog_compute.local_index.answer_cache import AnswerCache
from indilog_compute.local_index.answers import Empty, Found, Matches, Miss
from indilog_compute.local_index.expectations import Expectations
from indilog_compute.local_index.tag_cache import TagCache
from indilog_compute.local_index.tag_rows import First
from tests.support.repeated import first_of

TAGS = range(1, 9)
OWN = ShardId(1)
SHARDS = (ShardId(0), OWN, ShardId(2))
LATE_MAX = 12


class Question(NamedTuple):
    """A question to the index tier, about the log below `limit`."""

    kind: str
    tag: int
    limit: int
    newest: int


class Log:
    """The whole log, and a cache that receives parts of it."""

    def __init__(self, cache: TagCache, seed: int) -> None:
        self.cache = cache
        self.chance = random.Random(seed)
        self.records: list[tuple[int, ...]] = []
        self.position = 0
        self.asked: list[Question] = []
        self.answered: set[int] = set()

    def grow(self) -> None:
        """Append a few records of one or two shards and apply their index data."""
        weights = [8 // tag + 1 for tag in TAGS]
        parts = []
        for shard in sorted(self.chance.sample(SHARDS, k=self.chance.randint(1, 2))):
            first, count = len(self.records), self.chance.randint(1, 4)
            new = [
                tuple(self.chance.choices(TAGS, weights, k=self.chance.randint(0, 2)))
                for _ in range(count)
            ]
            self.records += new
            tags = array("Q", [tag for of_record in new for tag in of_record]).tobytes()
            parts.append(ShardTags(shard, first, count, bytes(map(len, new)), tags))
        rows = all_rows_of(parts) if self.chance.random() < 0.5 else None
        if rows is None:
            self.cache.apply(parts, self.position)
        else:
            self.cache.apply_sorted(rows, self.position)
        self.position += 1

    def look(self) -> None:
        """Look a tag up in the cache itself, which makes it wanted; all checks use a copy."""
        tag, bound = self.chance.choice(TAGS), self.chance.randint(0, len(self.records))
        check_lookups(self.cache, tag, bound, self.of(tag, len(self.records)))

    def of(self, tag: int, limit: int) -> list[int]:
        return [s for s, tags in enumerate(self.records[:limit]) if tag in tags]

    def ask(self) -> None:
        kind = self.chance.choice(("new", "refill"))
        tag, limit = self.chance.choice(TAGS), len(self.records)
        if kind == "new" and self.cache.knows(tag):
            return
        self.cache.expect(tag, limit)
        self.asked.append(Question(kind, tag, limit, self.chance.randint(1, 6)))
        if len(self.asked) > LATE_MAX:
            self.asked.pop(0)

    def answer(self) -> None:
        """Apply the answer to any question that was asked, which may be asked again later."""
        if not self.asked:
            return
        question = self.chance.choice(self.asked)
        if self.chance.random() < 0.9:
            self.asked.remove(question)
        if self.chance.random() < 0.1:
            self.cache.give_up(question.tag, question.limit)
            return
        self.answered.add(question.tag)
        below = self.of(question.tag, question.limit)
        if question.kind == "new":
            first = First(below[0], ShardId(0)) if below else None
            self.cache.learn_first(question.tag, question.limit, first)
        else:
            newest = below[-question.newest :]
            shards = [ShardId(0)] * len(newest)
            complete = len(below) < question.newest
            self.cache.refill(question.tag, question.limit, newest, shards, complete=complete)

    def check(self) -> None:
        self.cache.check_invariants()
        cache = copy.deepcopy(self.cache)
        for tag in (*TAGS, 99):
            truth = self.of(tag, len(self.records))
            for bound in (*range(len(self.records) + 1), MAX_SEQNUM):
                check_lookups(cache, tag, bound, truth)
        cache.check_invariants()


def all_rows_of(parts: list[ShardTags]) -> RowsByTag | None:
    """Return the rows of parts, however few and different they are, as `rows_by_tag` does."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tags_sorted, "_FEW", 1)
        patched.setattr(tags_sorted, "_TAG_SHARE", 0)
        return tags_sorted.rows_by_tag(parts)


def check_lookups(cache: TagCache, tag: int, bound: int, truth: list[int]) -> None:
    after = [s for s in truth if s >= bound]
    before = [s for s in truth if s <= bound]
    match cache.find_next(tag, bound):
        case Found(seqnum=seqnum):
            assert [seqnum] == after[:1], (tag, bound)
        case Empty():
            assert not after, (tag, bound)
        case Miss():
            pass
    match cache.find_prev(tag, bound):
        case Found(seqnum=seqnum):
            assert [seqnum] == before[-1:], (tag, bound)
        case Empty():
            assert not before, (tag, bound)
        case Miss():
            pass
    for limit in (1, 3):
        match cache.find_range(tag, bound, limit):
            case Matches(seqnums=seqnums):
                assert list(seqnums) == after[:limit], (tag, bound)
            case Miss():
                pass


def run(seed: int, seqnums_max: int, per_tag_max: int, bytes_max: int, steps: int) -> Log:
    per_tag_max = min(per_tag_max, seqnums_max)
    cache = TagCache(seqnums_max, per_tag_max, bytes_max=bytes_max, own=(OWN,))
    log = Log(cache, seed)
    for step in range(steps):
        log.chance.choice((log.grow, log.grow, log.ask, log.answer, log.look))()
        if step % 3 == 0:
            log.check()
    log.check()
    return log


@given(
    seed=st.integers(0, 10**6),
    seqnums_max=st.sampled_from([1, 3, 6, 12, 10_000]),
    per_tag_max=st.sampled_from([1, 2, 5, 1000]),
    bytes_max=st.sampled_from([600, 2_000, 1 << 30]),
)
def test_proven_answers_are_exact_for_any_delay_of_the_index_tier(
    seed: int, seqnums_max: int, per_tag_max: int, bytes_max: int
) -> None:
    run(seed, seqnums_max, per_tag_max, bytes_max, steps=40)


Planted = Literal[
    "an eviction forgotten", "a limit ignored", "an expected tag skipped", "a new tag skipped",
    "a row not extended",
]  # fmt: skip


@pytest.mark.parametrize("planted", get_args(Planted))
def test_the_check_detects_a_planted_race(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    match planted:
        case "an eviction forgotten":
            monkeypatch.setattr(Expectations, "lose", forgotten)
            monkeypatch.setattr(Expectations, "lose_all", forgotten)
        case "a limit ignored":
            monkeypatch.setattr(Expectations, "fulfil", any_limit)
        case "an expected tag skipped":
            monkeypatch.setattr(Expectations, "begins_row", without_expected)
        case "a new tag skipped":
            monkeypatch.setattr(Expectations, "begins_row", without_firsts)
        case "a row not extended":
            monkeypatch.setattr(TagCache, "_add", without_rows)
    with pytest.raises(AssertionError):
        run_seeds(300)


def without_expected(expectations: Expectations, tag: int) -> bool:
    """A bug: another writer's record between question and answer is skipped, and the answer used.

    The row then counts as complete and lacks it.
    """
    return tag in expectations.wanted or tag in expectations.firsts


def without_firsts(expectations: Expectations, tag: int) -> bool:
    """A bug: another writer's first record of a tag that was proven new is skipped."""
    return tag in expectations.wanted or tag in expectations.limits


_ADD = TagCache._add


def without_rows(
    cache: TagCache, tags: Iterable[int], seqnums: Iterable[int], shard: ShardId
) -> None:
    """A bug: another writer's records do not extend the row of a tag that was written here."""
    begins = cache._expectations.begins_row
    pairs = zip(tags, seqnums, strict=True)
    taken = [(tag, seqnum) for tag, seqnum in pairs if shard == OWN or begins(tag)]
    _ADD(cache, [tag for tag, _ in taken], [seqnum for _, seqnum in taken], shard)


def forgotten(_expectations: Expectations, _lost: object) -> None:
    """A bug: the answer about an evicted tag is applied."""


def any_limit(expectations: Expectations, tag: int, _limit: int) -> bool:
    """A bug: an answer to an earlier question is applied to this one."""
    return expectations.limits.pop(tag, None) is not None


def run_seeds(seeds: int) -> None:
    for seed in range(seeds):
        run(seed, 4, 4, 1 << 30, steps=60)


@pytest.mark.parametrize("seed", first_of(range(5), 2))
def test_with_room_for_everything_an_announced_tag_is_known_from_its_first_record_on(
    seed: int,
) -> None:
    log = Log(TagCache(10_000, 1000), seed)
    for _ in range(10):
        log.grow()
    cache = TagCache(10_000, 1000, position=log.position)  # starts now, empty
    log.cache = cache
    start = len(log.records)
    for tag in TAGS:
        cache.expect(tag, start)
    for _ in range(10):
        log.grow()
    for tag in TAGS:
        below = log.of(tag, start)
        if tag % 2:
            cache.refill(tag, start, below, [ShardId(0)] * len(below), complete=True)
        else:
            cache.learn_first(tag, start, First(below[0], ShardId(0)) if below else None)
    log.check()
    for tag in TAGS:
        truth = log.of(tag, len(log.records))
        first = Found(truth[0], ShardId(0)) if truth else Empty()
        assert cache.find_next(tag, 0) == first
        if tag % 2 or not log.of(tag, start):
            assert not any(isinstance(cache.find_prev(tag, b), Miss) for b in range(start + 20))


@given(
    seed=st.integers(0, 10**6),
    entries_max=st.sampled_from([1, 2, 7, 1000]),
)
def test_cached_answers_stay_exact_while_the_log_grows(seed: int, entries_max: int) -> None:
    chance = random.Random(seed)
    cache = AnswerCache(entries_max)
    tags_of: list[int] = []
    for _ in range(30):
        tags_of += chance.choices((1, 2, 3), k=chance.randint(0, 3))
        tail, tag = len(tags_of), chance.choice((1, 2, 3))
        of_tag = [s for s, other in enumerate(tags_of) if other == tag]
        bound = chance.randint(0, tail + 1)
        after = [s for s in of_tag if s >= bound]
        before = [s for s in of_tag if s <= bound]
        if chance.random() < 0.5:
            if after:
                cache.learn_next(tag, bound, after[0], ShardId(after[0] % 3))
        elif before:
            cache.learn_prev(tag, bound, before[-1], ShardId(before[-1] % 3), tail)
        cache.check_invariants()
        check_kept(cache, tags_of, seen=chance.randint(0, tail))


def check_kept(cache: AnswerCache, tags_of: list[int], seen: int) -> None:
    for tag, bound in [(t, b) for t in (1, 2, 3) for b in range(len(tags_of) + 2)]:
        of_tag = [s for s, other in enumerate(tags_of) if other == tag]
        match cache.find_next(tag, bound, seen):
            case Found(seqnum=seqnum, shard=shard):
                assert seqnum == min(s for s in of_tag if s >= bound)
                assert seqnum < seen
                assert shard == seqnum % 3
            case Empty():
                raise AssertionError("further records may come")
            case Miss():
                pass
        match cache.find_prev(tag, bound, seen):
            case Found(seqnum=seqnum):
                assert seqnum == max(s for s in of_tag if s <= bound)
                assert seqnum < seen
            case Empty():
                assert not any(s <= bound for s in of_tag)
            case Miss():
                pass
