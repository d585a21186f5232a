"""A21 on a small scale: the local index stays within its limits over new tags, a complete one
grows.
"""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from bench.index_memory import MIB, RECORDS, Local, Side, indexed, limit_bytes, parts_of
from indilog.config import NodeConfig, node_config
from tests.support.repeated import repeated

APPENDS = 160 * RECORDS


def small(side: Side) -> NodeConfig:
    """Limits that are exceeded many times."""
    assert side != "complete"
    return node_config(
        local_index=side,
        suffix_bytes_max=32 * 1024,
        popularity_bytes_max=64 * 1024,
        tag_cache_bytes_max=2 * MIB,
        answer_cache_bytes_max=256 * 1024,
    )


def traced_bytes(index: object, appends: int) -> list[int]:
    """Append; return the memory of the index after each tenth of the records."""
    other = indexed("complete")
    for part in parts_of(RECORDS):  # memory allocated once per process does not count
        other.add(part)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        sizes = []
        every = appends // RECORDS // 10
        for number, part in enumerate(parts_of(appends), 1):
            index.add(part)  # type: ignore[attr-defined]
            if number % every == 0:
                del part
                sizes.append(tracemalloc.get_traced_memory()[0] - before)
        return sizes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("side", ["default", repeated("extended")])
def test_local_index_bytes_stay_constant_over_new_tags(side: Side) -> None:
    config = small(side)
    index = indexed(side, config)
    assert isinstance(index, Local)
    sizes = traced_bytes(index, APPENDS)
    index.index.check_invariants()
    assert max(sizes) <= 1.1 * limit_bytes(config)
    assert max(sizes[7:]) <= 1.05 * max(sizes[4:7]), "it does not grow any more"
    assert index.size_bytes <= limit_bytes(config)
    assert index.hits == (index.reads if side == "extended" else 1), "1: the log's first record"


def test_a_complete_index_grows_with_the_log() -> None:
    index = indexed("complete")
    sizes = traced_bytes(index, APPENDS)
    assert sizes[9] > 1.8 * sizes[4]
    assert sizes[9] > 2 * limit_bytes(small("default"))
