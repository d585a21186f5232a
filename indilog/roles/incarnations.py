"""Which incarnation of each node was heard last.

A process that restarts takes a greater epoch (`Received.incarnation`). What an earlier incarnation
said may be untrue by then: it may have lost its disk. The transport refuses frames of an
incarnation older than the newest that it has heard; a role that rests its decisions on what a node
said checks it too, so that it holds in any order of arrival.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from indilog.base.ids import Epoch, NodeId


class Heard(enum.Enum):
    """How the incarnation of a message relates to the newest one heard of its sender."""

    OLDER = enum.auto()
    SAME = enum.auto()
    NEWER = enum.auto()


class Incarnations:
    """The newest incarnation heard of each of some nodes; epochs begin at 1."""

    __slots__ = ("_newest",)

    def __init__(self, nodes: Iterable[NodeId]) -> None:
        self._newest = dict.fromkeys(nodes, Epoch(0))

    def note(self, node: NodeId, incarnation: Epoch) -> Heard:
        """Compare a message's incarnation with the newest one, which it becomes if it is newer.

        The first message of a node is `NEWER`. A node that is not among those given is `SAME`.
        """
        newest = self._newest.get(node, incarnation)
        if incarnation == newest:
            return Heard.SAME
        if incarnation < newest:
            return Heard.OLDER
        self._newest[node] = incarnation
        return Heard.NEWER
