"""All roles during trims, with late, repeated and lost messages (PITFALLS A22). A record reported
as trimmed to a session stays trimmed for it, and no other record is missing.
"""

from __future__ import annotations

import random

import pytest

from indilog.base.errors import TrimmedError
from indilog.base.ids import log_tag, tag_hash
from indilog.config import Config, node_config
from indilog.kernel.metalog import Floor
from indilog.kernel.view import view_of
from indilog.wire.messages import Direction
from indilog_compute.reads.operation import PENDING, Answered
from tests.support.repeated import first_of
from tests.support.role_cluster import LOG, RoleCluster, Waiter

TAGS = ("a", "b", "c")
SIZES: dict[str, dict[str, float | str]] = {
    "default": {},
    "none": {
        "suffix_cuts_max": 0,
        "popularity_entries_max": 0,
        "tag_cache_seqnums_max": 0,
        "tag_cache_seqnums_per_tag_max": 0,
        "record_cache_bytes_max": 0,
        "answer_cache_entries_max": 0,
    },
    "small": {
        "suffix_cuts_max": 2, "tag_cache_seqnums_max": 8, "tag_cache_seqnums_per_tag_max": 3,
        "index_forget_entries_min": 1, "reclaim_rest_s_min": 0.01,
    },
    "extended": {"local_index": "extended", "refill_after_misses": 1},
    "extended small": {
        "local_index": "extended", "refill_after_misses": 1, "refill_seqnums_max": 2,
        "suffix_cuts_max": 2, "tag_cache_seqnums_max": 8, "tag_cache_seqnums_per_tag_max": 3,
        "answer_cache_entries_max": 5, "record_cache_bytes_max": 1500,
        "index_forget_entries_min": 1, "reclaim_rest_s_min": 0.01,
    },
}  # fmt: skip


class History:
    """All appends and trims, and the results that one session must see."""

    def __init__(self, cluster: RoleCluster) -> None:
        self.cluster = cluster
        self.floors: dict[str | None, int] = dict.fromkeys((None, *TAGS), 0)
        self.position = 0

    def trim(self, tag: str | None, until: int, engine: int) -> None:
        waiter = Waiter()
        hashed = log_tag(LOG) if tag is None else tag_hash(LOG, tag)
        self.cluster.engine(engine).trims.start(Floor(hashed, until, tag is None), waiter)
        self.cluster.run_until(lambda: waiter.outcome is not PENDING)
        assert isinstance(waiter.outcome, Answered), waiter.outcome
        self.position = max(self.position, waiter.outcome.position)
        self.floors[tag] = max(self.floors[tag], until)

    def read(self, direction: Direction, tag: str | None, bound: int, engine: int) -> object:
        """Return the seqnum found, None, or the trim floor as text."""
        log = log_tag(LOG)
        hashed = log if tag is None else tag_hash(LOG, tag)
        waiter = Waiter()
        role = self.cluster.engine(engine)
        try:
            value: object = role.read(direction, hashed, bound, self.position, waiter, log=log)
        except TrimmedError as error:
            return f"trimmed below {error.first_seqnum}"
        if value is PENDING:
            self.cluster.run_until(lambda: waiter.outcome is not PENDING)
            assert isinstance(waiter.outcome, Answered), waiter.outcome
            value = waiter.outcome.value
            self.position = max(self.position, waiter.outcome.position)
        if isinstance(value, TrimmedError):
            return f"trimmed below {value.first_seqnum}"
        return getattr(value, "seqnum", None)

    def expected(self, direction: Direction, tag: str | None, bound: int) -> object:
        floor = max(self.floors[None], self.floors[tag])
        alive = [
            seqnum
            for seqnum, (_, tags) in sorted(self.cluster.oracle.records.items())
            if seqnum >= floor
            and (tag is None or tag in tags)
            and not (tags and all(seqnum < self.floors[of] for of in tags))
        ]
        if direction is Direction.NEXT:
            found = next((s for s in alive if s >= bound), None)
            return f"trimmed below {floor}" if bound < floor else found
        found = next((s for s in reversed(alive) if s <= bound), None)
        return f"trimmed below {floor}" if found is None and floor else found


def run(sizes: str, seed: int, **faults: float) -> None:
    config = Config(node=node_config(**SIZES[sizes]))
    view = view_of(storage_nodes=2, replicas=2, index_shards=3, engines=2)
    cluster = RoleCluster(view, config, seed=seed, **faults)  # type: ignore[arg-type]
    history, choose = History(cluster), random.Random(seed)
    for _ in range(25):
        for _ in range(choose.randrange(4)):
            tags = [t for t in TAGS if choose.random() < 0.4]
            cluster.append(b"x", *tags, engine=choose.randrange(2))
        cluster.settle()
        written = len(cluster.oracle.records)
        engine = choose.randrange(2)
        history.position = max(history.position, cluster.engine(engine).position)
        if choose.random() < 0.5:
            history.trim(choose.choice((None, *TAGS)), choose.randrange(written + 1), engine)
        if choose.random() < 0.15:
            cluster.start(choose.choice(view.index_nodes + view.storage_nodes))
        for _ in range(6):
            direction = choose.choice(list(Direction))
            asked = direction, choose.choice((None, *TAGS)), choose.randrange(written + 2)
            assert history.read(*asked, choose.randrange(2)) == history.expected(*asked), asked


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", first_of(range(6), 2))
def test_a_session_reads_untrimmed_records_and_gets_errors_for_trimmed_ones(
    seed: int, sizes: str
) -> None:
    run(sizes, seed, delay=0.1, repeat=0.1)


@pytest.mark.parametrize("seed", first_of(range(6), 2))
def test_a_session_sees_trims_correctly_when_messages_are_lost(seed: int) -> None:
    run("small", seed, lose=0.05, delay=0.1)
