"""Keeps the disk-full notifications that nodes sent to this compute node (ARCHITECTURE 11, decision
0009). `ShardWriter` refuses appends while the primary or too many replicas have no room. Logs whose
records are in cells do the same (`indilog_cells.driver`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from indilog.base.errors import DiskFullError
from indilog.base.ids import Instant, NodeId
from indilog.roles.disk_full import BELIEVED_S, no_room_on


class FullDisks:
    """Keeps each notification for `BELIEVED_S`; a node whose disk is still full repeats it.

    Attributes:
        until: the nodes with full disks, and when each notification expires.
    """

    __slots__ = ("until",)

    def __init__(self) -> None:
        self.until: dict[NodeId, Instant] = {}

    def permit_appends(self, replicas: Sequence[NodeId], copies: int, quorum: int) -> bool:
        """Whether the disks that appends need have room.

        Appends need the disk of the primary, and the disks of `quorum` of the first `copies`
        replicas. Further replicas do not count.
        """
        if not self.until:
            return True
        full = sum(replica in self.until for replica in replicas[:copies])
        return self.until.keys() <= set(replicas) and full <= copies - quorum

    def forget(self, nodes: Collection[NodeId]) -> None:
        """Drop the notifications of nodes that are no longer replicas."""
        for node in nodes:
            self.until.pop(node, None)

    def note(self, node: NodeId, *, full: bool, now: Instant) -> None:
        """Note whether the disk of `node` is full."""
        if full:
            self.until[node] = Instant(now + BELIEVED_S)
        else:
            self.until.pop(node, None)

    def expire(self, now: Instant) -> None:
        """Drop notifications that were not repeated."""
        if self.until and min(self.until.values()) <= now:
            self.until = {node: until for node, until in self.until.items() if until > now}

    def error(self) -> DiskFullError:
        """Return the error of a refused append."""
        return no_room_on(*sorted(self.until))

    def deadline(self) -> Instant | None:
        """When the next notification expires; None: there is none."""
        return min(self.until.values()) if self.until else None
