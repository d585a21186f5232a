"""What faults the platform promises to survive, and which of them are outstanding now.

"What the settings promise" (docs/OPERATIONS.md), for three sequencers, three replicas of which two
acknowledge, and two replicas of each index shard: one node of each group may be away or lose its
disk. The next disk of a group may be harmed only when the group is whole again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Final, NamedTuple

SUPERVISOR: Final = "supervisor"
ZOOKEEPER: Final = "zookeeper"
CLOCK: Final = "clock"
EVERYTHING: Final = "everything"
_OTHERS: Final = (SUPERVISOR, ZOOKEEPER, CLOCK, EVERYTHING)


class Kind(NamedTuple):
    """A kind of fault.

    Attributes:
        targets: what it may hit.
        weight: how often it is drawn, compared with others.
        longest_s: the longest time until it is undone; 0: it is over at once.
        harms_disk: whether bytes that the node has synced are lost.
        latent: whether the harm may stay unnoticed until the bytes are read.
    """

    targets: tuple[str, ...]
    weight: int
    longest_s: float = 0.0
    harms_disk: bool = False
    latent: bool = False


class Topology:
    """The processes of the tested cluster, and what may hit them.

    Attributes:
        groups: of each group one may be impaired at a time. All may be killed at once if none is
            impaired.
        group_of: the group of each target.
        disks: the processes whose disks hold what was acknowledged.
        gateways: the processes whose gateways the callers use.
        small_disk: the process whose disk can be filled.
        kinds: the kinds of faults.
    """

    def __init__(
        self,
        groups: Mapping[str, tuple[str, ...]],
        *,
        disks: tuple[str, ...],
        gateways: tuple[str, ...],
        small_disk: str,
    ) -> None:
        self.groups = groups
        self.group_of = {node: group for group, nodes in groups.items() for node in nodes}
        self.disks, self.gateways, self.small_disk = disks, gateways, small_disk

    @property
    def processes(self) -> tuple[str, ...]:
        """The processes of the cluster."""
        return tuple(node for node in self.group_of if node not in _OTHERS)

    @cached_property
    def kinds(self) -> Mapping[str, Kind]:
        """The kinds of faults, by name."""
        all_, disks = self.processes, self.disks
        kinds = {
            "kill": Kind(all_, 10),
            "stop": Kind(all_, 8, longest_s=8.0),
            "partition": Kind(all_, 8, longest_s=8.0),
            "one-sided partition": Kind(all_, 6, longest_s=8.0),
            "kill everything": Kind((EVERYTHING,), 1),
            "kill supervisor": Kind((SUPERVISOR,), 3, longest_s=6.0),
            "kill ZooKeeper's leader": Kind((ZOOKEEPER,), 3, longest_s=6.0),
            "kill worker": Kind(self.gateways, 4),
            "wiped disk": Kind(disks, 4, harms_disk=True),
            "flipped bit": Kind(disks, 4, harms_disk=True, latent=True),
            "full disk": Kind((self.small_disk,), 2, longest_s=8.0),
            "slow disk": Kind(disks, 4, longest_s=8.0),
            "failed sync": Kind(disks, 3, longest_s=3.0),
            "clock jump": Kind((CLOCK,), 3, longest_s=10.0),
        }
        return {
            name: kind for name, kind in kinds.items() if set(kind.targets) <= self.group_of.keys()
        }


_SEQUENCERS: Final = ("sequencer-0", "sequencer-1", "sequencer-2")
_STORAGE: Final = ("storage-0", "storage-1", "storage-2", "storage-3")
_ENGINES: Final = ("engine-0", "engine-1")
_EACH_ONE: Final = ("node-0", "node-1", "node-2")
TOPOLOGIES: Final[Mapping[str, Topology]] = {
    "processes": Topology(
        {
            "sequencers": _SEQUENCERS,
            "storage": _STORAGE,
            "index shard 0": ("index-0-0", "index-0-1"),
            "index shard 1": ("index-1-0", "index-1-1"),
            "aggregators": ("aggregator-0", "aggregator-1"),
            "compute": _ENGINES,
            "supervisor": (SUPERVISOR,),
            "clock": (CLOCK,),
            "all": (EVERYTHING,),
        },
        disks=(*_SEQUENCERS, *_STORAGE),
        gateways=_ENGINES,
        small_disk="storage-1",
    ),
    "machines": Topology(
        {
            "all roles": _EACH_ONE,
            "compute": ("node-3", "node-4"),
            "metadata store": (ZOOKEEPER,),
            "clock": (CLOCK,),
            "all": (EVERYTHING,),
        },
        disks=_EACH_ONE,
        gateways=("node-0", "node-3", "node-4"),
        small_disk="node-1",
    ),
}
"""Either a process for each node, with a supervisor. Or `indilog node` on three machines with all
roles and on two with a compute node only, and an ensemble of ZooKeeper.
"""


class Fault(NamedTuple):
    """A fault of the plan.

    Attributes:
        pause_s: seconds after the group has recovered from the fault before.
        length_s: seconds until it is undone.
        variant: a number that decides the rest: the direction of a partition, the bit that flips.
    """

    kind: str
    target: str
    pause_s: float = 0.0
    length_s: float = 0.0
    variant: int = 0

    def __str__(self) -> str:
        return f"{self.kind} of {self.target}"


class Promise:
    """The outstanding faults. A fault is outstanding until the cluster has recovered from it.

    Attributes:
        outstanding: by group.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.outstanding: dict[str, Fault] = {}
        self._latent: dict[str, str] = {}
        """By group the node whose disk may have harm that was not noticed yet."""

    def target_of(self, fault: Fault) -> Fault:
        """Return the fault with the node that it may hit.

        While harm of one disk may be unnoticed, another disk of its group is not harmed: the fault
        hits the same disk again.
        """
        if not self._topology.kinds[fault.kind].harms_disk:
            return fault
        return fault._replace(target=self._latent.get(self._group_of(fault.target), fault.target))

    def allows(self, fault: Fault) -> bool:
        """Return whether the platform promises to survive the fault beside the outstanding ones."""
        if fault.target == EVERYTHING:
            return not self.outstanding
        return (
            self._group_of(fault.target) not in self.outstanding
            and self._group_of(EVERYTHING) not in self.outstanding
        )

    def begin(self, fault: Fault) -> None:
        """Note that a fault begins."""
        assert self.allows(fault), f"{fault} is beyond the promise"
        assert fault == self.target_of(fault), f"{fault} may be the second harmed disk"
        self.outstanding[self._group_of(fault.target)] = fault
        if self._topology.kinds[fault.kind].latent:
            self._latent[self._group_of(fault.target)] = fault.target

    def end(self, fault: Fault) -> None:
        """Note that the cluster has recovered from a fault."""
        assert self.outstanding.pop(self._group_of(fault.target)) == fault
        kind = self._topology.kinds[fault.kind]
        if kind.harms_disk and not kind.latent:
            self._latent.pop(self._group_of(fault.target), None)  # its disk was filled anew

    def _group_of(self, target: str) -> str:
        return self._topology.group_of[target]
