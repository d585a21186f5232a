"""What faults the platform promises to survive, and which of them are outstanding now.

"What the settings promise" (docs/OPERATIONS.md), for three sequencers, three replicas of which two
acknowledge, and two replicas of each index shard: one node of each group may be away or lose its
disk. The next disk of a group may be harmed only when the group is whole again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

SUPERVISOR: Final = "supervisor"
CLOCK: Final = "clock"
EVERYTHING: Final = "everything"

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "sequencers": ("sequencer-0", "sequencer-1", "sequencer-2"),
    "storage": ("storage-0", "storage-1", "storage-2", "storage-3"),
    "index shard 0": ("index-0-0", "index-0-1"),
    "index shard 1": ("index-1-0", "index-1-1"),
    "aggregators": ("aggregator-0", "aggregator-1"),
    "compute": ("engine-0", "engine-1"),
    "supervisor": (SUPERVISOR,),
    "clock": (CLOCK,),
    "all": (EVERYTHING,),
}
"""The nodes of the tested cluster. Of each group one may be impaired at a time. All nodes may be
killed at once if none is impaired.
"""
GROUP_OF: Final[Mapping[str, str]] = {n: group for group, nodes in GROUPS.items() for n in nodes}
NODES: Final = tuple(n for n in GROUP_OF if n not in (SUPERVISOR, CLOCK, EVERYTHING))
DISKS: Final = (*GROUPS["sequencers"], *GROUPS["storage"])
"""The nodes whose disks hold what was acknowledged."""


class Kind(NamedTuple):
    """A kind of fault.

    Attributes:
        targets: the nodes that it may hit.
        weight: how often it is drawn, compared with others.
        longest_s: the longest time until it is undone; 0: it is over at once.
        harms_disk: whether bytes that the node has synced are lost.
        latent: whether the harm may stay unnoticed until the bytes are read.
    """

    targets: Sequence[str]
    weight: int
    longest_s: float = 0.0
    harms_disk: bool = False
    latent: bool = False


KINDS: Final[Mapping[str, Kind]] = {
    "kill": Kind(NODES, 10),
    "stop": Kind(NODES, 8, longest_s=8.0),
    "partition": Kind(NODES, 8, longest_s=8.0),
    "one-sided partition": Kind(NODES, 6, longest_s=8.0),
    "kill everything": Kind((EVERYTHING,), 1),
    "kill supervisor": Kind((SUPERVISOR,), 3, longest_s=6.0),
    "kill worker": Kind(GROUPS["compute"], 4),
    "wiped disk": Kind(DISKS, 4, harms_disk=True),
    "flipped bit": Kind(DISKS, 4, harms_disk=True, latent=True),
    "full disk": Kind(("storage-1",), 2, longest_s=8.0),
    "slow disk": Kind(DISKS, 4, longest_s=8.0),
    "failed sync": Kind(DISKS, 3, longest_s=3.0),
    "clock jump": Kind((CLOCK,), 3, longest_s=10.0),
}


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

    @property
    def group(self) -> str:
        """The group of its target."""
        return GROUP_OF[self.target]

    def __str__(self) -> str:
        return f"{self.kind} of {self.target}"


class Promise:
    """The outstanding faults. A fault is outstanding until the cluster has recovered from it.

    Attributes:
        outstanding: by group.
    """

    def __init__(self) -> None:
        self.outstanding: dict[str, Fault] = {}
        self._latent: dict[str, str] = {}
        """By group the node whose disk may have harm that was not noticed yet."""

    def target_of(self, fault: Fault) -> Fault:
        """Return the fault with the node that it may hit.

        While harm of one disk may be unnoticed, another disk of its group is not harmed: the fault
        hits the same disk again.
        """
        if not KINDS[fault.kind].harms_disk:
            return fault
        return fault._replace(target=self._latent.get(fault.group, fault.target))

    def allows(self, fault: Fault) -> bool:
        """Return whether the platform promises to survive the fault beside the outstanding ones."""
        if fault.target == EVERYTHING:
            return not self.outstanding
        return fault.group not in self.outstanding and GROUP_OF[EVERYTHING] not in self.outstanding

    def begin(self, fault: Fault) -> None:
        """Note that a fault begins."""
        assert self.allows(fault), f"{fault} is beyond the promise"
        assert fault == self.target_of(fault), f"{fault} may be the second harmed disk"
        self.outstanding[fault.group] = fault
        if KINDS[fault.kind].latent:
            self._latent[fault.group] = fault.target

    def end(self, fault: Fault) -> None:
        """Note that the cluster has recovered from a fault."""
        assert self.outstanding.pop(fault.group) == fault
        kind = KINDS[fault.kind]
        if kind.harms_disk and not kind.latent:
            self._latent.pop(fault.group, None)  # its disk was filled anew
