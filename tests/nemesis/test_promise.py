"""The nemesis never injects more than the platform promises to survive."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

import pytest

from tests.nemesis.plan import kinds_of, planned
from tests.nemesis.promise import TOPOLOGIES, Fault, Promise, Topology

STEPS = 400
PROCESSES = TOPOLOGIES["processes"]
both = pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)


class Model:
    """What is impaired, kept apart from `Promise`: the nodes, and the disks that lack something."""

    def __init__(self, topology: Topology) -> None:
        self._group = topology.group_of
        self.impaired: set[str] = set()
        self.harmed: set[str] = set()
        """Disks that may lack what they synced: a flipped bit stays until a repaired wipe."""

    def begin(self, fault: Fault) -> None:
        self.impaired.add(fault.target)
        if fault.kind in ("wiped disk", "flipped bit"):
            self.harmed.add(fault.target)

    def end(self, fault: Fault) -> None:
        self.impaired.remove(fault.target)
        if fault.kind == "wiped disk":
            self.harmed.discard(fault.target)

    def check(self) -> None:
        assert max(Counter(map(self._group.__getitem__, self.impaired)).values(), default=0) <= 1
        assert max(Counter(map(self._group.__getitem__, self.harmed)).values(), default=0) <= 1
        assert "everything" not in self.impaired or len(self.impaired) == 1


@both
@pytest.mark.parametrize("seed", range(20))
def test_one_node_of_a_group_is_impaired_and_one_disk_harmed(topology: Topology, seed: int) -> None:
    rng, promise, model = random.Random(seed), Promise(topology), Model(topology)
    plans = {
        group: planned(topology, seed, group, kinds_of(topology, group, topology.kinds))
        for group in topology.groups
    }
    begun = 0
    for _ in range(STEPS):
        if promise.outstanding and rng.random() < 0.5:
            fault = rng.choice(list(promise.outstanding.values()))
            promise.end(fault)
            model.end(fault)
        else:
            fault = promise.target_of(next(plans[rng.choice(list(plans))]))
            if promise.allows(fault):
                promise.begin(fault)
                model.begin(fault)
                begun += 1
        model.check()
    assert begun > STEPS // 10, "it does inject"


def test_a_second_disk_is_not_harmed_while_a_flipped_bit_may_be_unnoticed() -> None:
    promise = Promise(PROCESSES)
    flipped = Fault("flipped bit", "storage-0")
    promise.begin(flipped)
    promise.end(flipped)
    wiped = promise.target_of(Fault("wiped disk", "storage-1"))
    assert wiped.target == "storage-0"
    assert promise.target_of(Fault("kill", "storage-1")).target == "storage-1"
    promise.begin(wiped)
    promise.end(wiped)
    assert promise.target_of(Fault("wiped disk", "storage-1")).target == "storage-1"


def test_everything_is_killed_only_if_nothing_is_impaired() -> None:
    promise = Promise(PROCESSES)
    everything, kill = Fault("kill everything", "everything"), Fault("kill", "engine-0")
    promise.begin(kill)
    assert not promise.allows(everything)
    promise.end(kill)
    promise.begin(everything)
    assert not promise.allows(kill)


def test_a_seed_decides_the_faults() -> None:
    kinds = kinds_of(PROCESSES, "storage", PROCESSES.kinds)
    faults = list(islice(planned(PROCESSES, 7, "storage", kinds), 200))
    assert faults == list(islice(planned(PROCESSES, 7, "storage", kinds), 200))
    assert faults != list(islice(planned(PROCESSES, 8, "storage", kinds), 200))
    assert {fault.kind for fault in faults} == set(kinds)
    assert {fault.target for fault in faults} == set(PROCESSES.groups["storage"])
    assert all(fault.target in PROCESSES.kinds[fault.kind].targets for fault in faults)


@both
def test_every_kind_of_fault_hits_some_group(topology: Topology) -> None:
    kinds = {
        kind for group in topology.groups for kind in kinds_of(topology, group, topology.kinds)
    }
    assert kinds == set(topology.kinds)
    assert {*topology.disks, *topology.gateways, topology.small_disk} <= set(topology.processes)
