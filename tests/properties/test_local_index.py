"""The local index against a list of records that is searched linearly.

Every proven answer is exact at all bounds, for cache sizes 0, 1, small and default, and 1 to 6
shards (PITFALLS A19). The index misses only tags that it may have evicted, and its limits hold
after each step. The model shares nothing with the code under test but the names of the answers.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import product

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from indilog.base.ids import EMPTY_TAG, MAX_SEQNUM, ShardId
from indilog.config import NodeConfig, node_config
from indilog.kernel.lost_ranges import LostRange
from indilog.kernel.metalog import Span
from indilog.wire.messages import ShardTags
from indilog_compute.local_index import Answer, Empty, Found, LocalIndex, Matches, Miss
from indilog_compute.local_index.tag_cache import ALL_SHARDS

LOG = 2**63 + 5
TAGS = (LOG, 1, 2, 3, 2**64 - 1)
UNUSED_TAG = 4
NEVER = MAX_SEQNUM + 1

Cut = dict[int, list[list[int]]]
"""The index data of one metalog entry: the tags of each record of each productive shard."""


@dataclass(frozen=True)
class Appended:
    """One record in the model."""

    seqnum: int
    shard: int
    tags: Sequence[int]


@dataclass
class Model:
    """Every record since the index began, and the lookup results that the index received."""

    config: NodeConfig
    start: int
    own: Container[int] = ALL_SHARDS
    tail: int = 0
    records: list[Appended] = field(default_factory=list)
    cut_starts: list[int] = field(default_factory=list)
    tag_tail: int = 0
    learned: set[int] = field(default_factory=set)

    def matching(self, tag: int) -> list[Appended]:
        if tag == EMPTY_TAG:
            return self.records
        return [r for r in self.records if tag in r.tags and r.seqnum < self.tag_tail]

    def surely_known_from(self, tag: int) -> int:
        """Return the lowest bound that must not be a miss."""
        config = self.config
        if tag == EMPTY_TAG:
            if not config.caches.suffix_cuts_max:
                return NEVER
            return min(self.cut_starts[-config.caches.suffix_cuts_max :], default=self.tail)
        total, per_tag = (
            config.caches.tag_cache_seqnums_max,
            config.caches.tag_cache_seqnums_per_tag_max,
        )
        if self.own is not ALL_SHARDS and total < 200:
            return NEVER  # fewer tags can be wanted than are looked up
        held = sum(min(len(self.matching(tag)), per_tag + per_tag // 8) for tag in TAGS)
        matching = self.matching(tag)
        if not matching or not per_tag or held > total - total // 32:
            return NEVER  # unknown, or others may have pushed it out
        return matching[-per_tag:][0].seqnum


@st.composite
def configs(draw: st.DrawFn) -> NodeConfig:
    total = draw(st.sampled_from([0, 1, 5, 20, 200, 1_000_000]))
    per_tag = draw(st.sampled_from([0, 1, 2, 9, 10_000]))
    return node_config(
        suffix_cuts_max=draw(st.sampled_from([0, 1, 3, 100_000])),
        popularity_entries_max=draw(st.sampled_from([0, 1, 3, 10_000])),
        tag_cache_seqnums_max=total,
        tag_cache_seqnums_per_tag_max=min(per_tag, total),
    )


def cuts() -> st.SearchStrategy[Cut]:
    of_log = st.lists(st.sampled_from(TAGS), max_size=2).map(lambda tags: [LOG, *tags])
    any_tags = st.lists(st.sampled_from(TAGS), max_size=3)
    same_shape = st.tuples(st.sampled_from(TAGS), st.integers(1, 5)).map(
        lambda shape: [[LOG, shape[0]]] * shape[1]
    )
    records = st.one_of(st.lists(of_log | any_tags, min_size=1, max_size=4), same_shape)
    return st.dictionaries(st.integers(0, 5), records, max_size=6)


STEPS = st.lists(
    st.one_of(
        cuts().map(lambda cut: ("cut", cut)),
        st.just(("index data", None)),
        st.integers(0, 60).map(lambda back: ("learn", back)),
    ),
    max_size=10,
)


def part_of(first: int, shard: int, records: list[list[int]]) -> ShardTags:
    tags = array("Q", [tag for of_record in records for tag in of_record]).tobytes()
    counts = bytes(map(len, records))
    return ShardTags(ShardId(shard), first, len(records), counts, tags)


OWN = st.sampled_from([ALL_SHARDS, (), (ShardId(0),), (ShardId(2), ShardId(5))])
"""The shards that are written at the node of the index."""


@given(config=configs(), start=st.sampled_from([(0, 0), (7, 30)]), steps=STEPS, own=OWN)
def test_proven_answers_are_exact_at_all_bounds(
    config: NodeConfig,
    start: tuple[int, int],
    steps: list[tuple[str, object]],
    own: Container[int],
) -> None:
    position, tail = start
    index = LocalIndex(config, position, tail, own)
    model = Model(config, start=tail, own=own, tail=tail, tag_tail=tail)
    blocks: list[list[ShardTags]] = []  # of the positions that the tag cache has not applied
    for _, given_ in steps:
        if isinstance(given_, dict):
            blocks.append(append(index, model, given_))
        elif isinstance(given_, int):
            learn(index, model, given_)
        elif blocks:
            parts = blocks.pop(0)
            assert index.apply_block(index.tag_position, parts) is None
            model.tag_tail = max([model.tag_tail, *(p.first_seqnum + p.count for p in parts)])
        check_everything(index, model)
    applied = sum(isinstance(given_, dict) for _, given_ in steps) - len(blocks)
    assert index.tag_position == position + applied


def append(index: LocalIndex, model: Model, cut: Cut) -> list[ShardTags]:
    spans, parts, tail = [], [], model.tail
    for shard, records in sorted(cut.items()):
        spans.append(Span(ShardId(shard), 0, tail, len(records)))
        parts.append(part_of(tail, shard, records))
        model.records += [Appended(tail + i, shard, tags) for i, tags in enumerate(records)]
        tail += len(records)
    if cut:
        model.cut_starts.append(model.tail)
    model.tail = tail
    index.apply_spans(spans)
    return parts


def learn(index: LocalIndex, model: Model, back: int) -> None:
    """The index tier found a record, `back` records before the newest one."""
    if back < len(model.records):
        record = model.records[-1 - back]
        index.learn(record.seqnum, ShardId(record.shard))
        model.learned.add(record.seqnum)


def check_everything(index: LocalIndex, model: Model) -> None:
    index.check_invariants()
    bounds = [*range(max(0, model.start - 2), model.tail + 2), MAX_SEQNUM]
    for tag in (EMPTY_TAG, UNUSED_TAG, *TAGS):
        matching = model.matching(tag)
        known_from = model.surely_known_from(tag)
        for bound in bounds:
            after = [r for r in matching if r.seqnum >= bound]
            before = [r for r in matching if r.seqnum <= bound]
            check_next(index.find_next(tag, bound), after, known=bound >= known_from)
            check_prev(index.find_prev(tag, bound), before, model, known=bound >= known_from)
            for limit in (1, 4):
                check_range(index, (tag, bound, limit), after, known=bound >= known_from)
    check_points(index, model)
    check_bounds(index, model)


def check_next(answer: Answer, after: list[Appended], *, known: bool) -> None:
    match answer:
        case Found(seqnum=seqnum, shard=shard):
            assert after
            assert (seqnum, shard) == (after[0].seqnum, after[0].shard)
        case Empty():
            assert not after
        case Miss():
            assert not known


def check_prev(answer: Answer, before: list[Appended], model: Model, *, known: bool) -> None:
    match answer:
        case Found(seqnum=seqnum, shard=shard):
            assert before
            assert (seqnum, shard) == (before[-1].seqnum, before[-1].shard)
        case Empty():
            assert not before
            assert model.start == 0, "what was before the start is not known"
        case Miss():
            assert not (known and before)
            assert not known or model.start > 0


def check_range(
    index: LocalIndex, asked: tuple[int, int, int], after: list[Appended], *, known: bool
) -> None:
    match index.find_range(*asked):
        case Matches(seqnums=seqnums, shards=shards):
            expected = [(r.seqnum, r.shard) for r in after[: asked[2]]]
            assert list(zip(seqnums, shards, strict=True)) == expected
        case Miss():
            assert not known


def check_points(index: LocalIndex, model: Model) -> None:
    """`shard_of` is exact where it answers, and answers recent and learned seqnums."""
    recent = model.surely_known_from(EMPTY_TAG)
    all_learned = len(model.learned) <= model.config.caches.popularity_entries_max
    for record in model.records:
        shard = index.shard_of(record.seqnum)
        assert shard in (None, record.shard)
        if record.seqnum >= recent:
            assert shard == record.shard
    assert index.shard_of(model.tail) is None
    if model.config.caches.suffix_cuts_max == 0 and all_learned:
        assert all(index.shard_of(seqnum) is not None for seqnum in model.learned)


def check_bounds(index: LocalIndex, model: Model) -> None:
    """Count from outside the entries that the index can still answer."""
    config = model.config
    known = 0
    for tag in TAGS:
        of_tag = [r.seqnum for r in model.matching(tag) if is_known(index, tag, r.seqnum)]
        per_tag = config.caches.tag_cache_seqnums_per_tag_max
        assert len(of_tag) <= per_tag + per_tag // 8
        known += len(of_tag)
    assert known <= config.caches.tag_cache_seqnums_max
    status = index.status()
    assert status["tag_cache"]["entries"] == known
    assert status["suffix"]["entries"] <= config.caches.suffix_cuts_max
    assert status["popularity_cache"]["entries"] <= config.caches.popularity_entries_max


def is_known(index: LocalIndex, tag: int, seqnum: int) -> bool:
    return not isinstance(index.find_next(tag, seqnum), Miss)


@given(
    counts=st.lists(
        st.dictionaries(
            st.integers(0, 5), st.sampled_from([1, 2, 65_534, 65_535, 65_536, 200_000])
        ),
        min_size=1,
        max_size=4,
    )
)
def test_cuts_wider_than_two_bytes_are_exact_at_every_edge(counts: list[dict[int, int]]) -> None:
    index = LocalIndex(NodeConfig())
    edges: list[tuple[int, int, int]] = []  # first, last, shard
    tail = 0
    for of_cut in counts:
        spans = []
        for shard, count in sorted(of_cut.items()):
            spans.append(Span(ShardId(shard), 0, tail, count))
            edges.append((tail, tail + count - 1, shard))
            tail += count
        index.apply_spans(spans)
    index.check_invariants()
    for first, last, shard in edges:
        for seqnum in {first, (first + last) // 2, last}:
            assert index.find_next(EMPTY_TAG, seqnum) == Found(seqnum, ShardId(shard))
            assert index.find_prev(EMPTY_TAG, seqnum) == Found(seqnum, ShardId(shard))
    assert index.find_next(EMPTY_TAG, tail) == Empty()


@given(config=configs(), cuts=st.lists(st.tuples(cuts(), st.sets(st.integers(0, 9))), max_size=8))
def test_no_answer_extends_past_a_lost_record(
    config: NodeConfig, cuts: list[tuple[Cut, set[int]]]
) -> None:
    """A record whose tags are lost may be a match of any lookup."""
    index = LocalIndex(config)
    model = Model(config, start=0, tail=0, tag_tail=0)
    lost: set[int] = set()
    for cut, losing in cuts:
        first = model.tail
        parts = [with_lost(part, {first + n for n in losing}) for part in append(index, model, cut)]
        assert index.apply_block(index.tag_position, parts) is None
        model.tag_tail = model.tail
        lost |= {s for part in parts for one in part.lost for s in range(*one)}
        index.check_invariants()
        for tag, bound in product((UNUSED_TAG, *TAGS), range(model.tail + 1)):
            matching = [r.seqnum for r in model.matching(tag) if r.seqnum not in lost]
            after = [s for s in matching if s >= bound]
            before = [s for s in matching if s <= bound]
            lost_after = min((s for s in lost if s >= bound), default=model.tail)
            lost_before = max((s for s in lost if s <= bound), default=-1)
            answer = index.find_next(tag, bound)
            if isinstance(answer, Found):
                assert answer.seqnum == after[0] < lost_after
            elif isinstance(answer, Empty):
                assert (after, lost_after) == ([], model.tail)
            answer = index.find_prev(tag, bound)
            if isinstance(answer, Found):
                assert lost_before < answer.seqnum == before[-1]
            elif isinstance(answer, Empty):
                assert (before, lost_before) == ([], -1)
            page = index.find_range(tag, bound, 3)
            if isinstance(page, Matches):
                assert list(page.seqnums) == after[:3]
                assert lost_after >= (after[2] if len(after) > 2 else model.tail)


def with_lost(part: ShardTags, seqnums: set[int]) -> ShardTags:
    """Return index data that has lost the tags of some records."""
    tags = iter(array("Q", part.tags))
    kept = [[next(tags) for _ in range(count)] for count in part.tag_counts]
    own = [s for s in range(part.first_seqnum, part.first_seqnum + part.count) if s in seqnums]
    for seqnum in own:
        kept[seqnum - part.first_seqnum] = []
    left = part_of(part.first_seqnum, part.shard, kept)
    return msgspec.structs.replace(left, lost=tuple(LostRange(s, s + 1) for s in own))
