"""Runs of the nemesis: a real cluster keeps what it promises."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from tests.nemesis.command import nemesis
from tests.nemesis.promise import TOPOLOGIES, Topology
from tests.nemesis.report import verdict
from tests.nemesis.run import Outcome

SECONDS: Final = {"processes": 45.0, "machines": 300.0}
SEED = 1


def together(topology: Topology, outcome: Outcome) -> list[str]:
    """Return faults of one group that were outstanding at the same time."""
    found = sorted(outcome.injected, key=lambda injected: injected.began_s)
    return [
        f"{one} and {other}"
        for nodes in topology.groups.values()
        for one, other in pairwise(i for i in found if i.fault.target in nodes)
        if one.recovered_s > other.began_s
    ]


@pytest.mark.cluster
@pytest.mark.heavy
@pytest.mark.repeated("tests/simulation/test_simulation.py")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("topology", "policy"),
    [*((topology, "mask") for topology in TOPOLOGIES), ("processes", "finalize_add")],
)
def test_a_cluster_under_faults_keeps_its_promises(
    tmp_path: Path, seeds_wanted: int | None, topology: str, policy: str
) -> None:
    for seed in range(SEED, SEED + (seeds_wanted or 1)):
        directory = tmp_path / str(seed)
        directory.mkdir()
        kinds = list(TOPOLOGIES[topology].kinds)
        outcome = nemesis(seed, SECONDS[topology], kinds, directory, topology, policy)
        assert not outcome.violations, "\n".join(verdict(outcome, directory))
        assert not together(TOPOLOGIES[topology], outcome)
        assert len(outcome.injected) >= 10
        assert len({injected.fault.kind for injected in outcome.injected}) >= 4
        assert outcome.proxied_bytes > 0, "the nodes dial the proxies"
