"""The reproduction benchmark measures what it reports: a short run of two experiments."""

from __future__ import annotations

import argparse
import asyncio

from bench.reproduction import EXPERIMENTS, SideMeasurements, measure

READS_MIN = 200
"""Reads of each side, so that its shares are not those of a few reads."""


def found(experiment: str) -> dict[str, SideMeasurements]:
    """Measure for as long as this machine needs for enough reads."""
    seconds = 0.2
    while True:
        asked = argparse.Namespace(seconds=seconds, rounds=1, processes=False)
        sides = asyncio.run(measure(EXPERIMENTS[experiment], 8, asked))
        if min(side.reads for side in sides.values()) >= READS_MIN:
            return sides
        seconds *= 2


def test_new_tags_are_hits_with_detection_and_misses_without() -> None:
    sides = found("new-tags-skewed")
    assert sides["default"].local_hits < 0.1
    assert sides["extended"].local_hits > 0.5
    for side in sides.values():
        assert side.reads == sum(len(v) for k, v in side.latencies_s.items() if k != "append") > 0


def test_without_a_local_index_every_read_queries_the_index_tier_and_a_new_tag_is_local() -> None:
    sides = found("types")
    assert sides["tier"].local_hits < 0.05
    assert sides["tier"].share("exact") > 0.3
    assert sides["tier"].share("closest") > 0.3
    assert sides["local"].local_hits > 0.9
