"""The newest incarnation of each node.

A process that restarts takes a greater epoch (`Received.incarnation`). Reports of its earlier
incarnations may then be wrong, because the process may have lost its disk. The transport refuses
frames of an incarnation older than the newest one that it received. A role whose decisions depend
on reports checks the incarnation too, so that it is correct in any order of arrival. Sequencers use
`Incarnations`.
"""

from __future__ import annotations

import enum

from indilog.base.ids import Epoch, NodeId


class IncarnationOrder(enum.Enum):
    """How the incarnation of a message relates to the newest one received from its sender."""

    OLDER = enum.auto()
    SAME = enum.auto()
    NEWER = enum.auto()


class Incarnations:
    """The newest incarnation received from each node; epochs begin at 1.

    The transport limits how many nodes there are.
    """

    __slots__ = ("_newest",)

    def __init__(self) -> None:
        self._newest: dict[NodeId, Epoch] = {}

    def note(self, node: NodeId, incarnation: Epoch) -> IncarnationOrder:
        """Compare a message's incarnation with the newest one, and store the greater.

        The first message of a node is `NEWER`.
        """
        newest = self._newest.get(node, Epoch(0))
        if incarnation == newest:
            return IncarnationOrder.SAME
        if incarnation < newest:
            return IncarnationOrder.OLDER
        self._newest[node] = incarnation
        return IncarnationOrder.NEWER
