"""The interface by which a compute node asks other nodes about logs of other kinds than `shared`.

`LocalLogs` implements it. `indilog_compute.log_kinds` and `indilog_cells.opening` call it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from indilog.base.ids import NodeId
from indilog.wire.cell_messages import CellAnswer, CellQuestion


class NodeRequests(Protocol):
    """Requests to other nodes. `folder` identifies a log: no other log has the same folder."""

    async def ask_cells(self, node: NodeId, question: CellQuestion, /) -> CellAnswer:
        """Ask a storage node about write-once cells; return its answer.

        Raises:
            QuorumUnavailableError: the node did not answer in time; a write may have taken effect.
            OverloadedError: too many questions wait; this one was not sent.
            NotReadyError: the platform has stopped.
        """

    def full_disks(self) -> Collection[NodeId]:
        """Return the nodes that have reported that their disks are full."""

    async def append_through(
        self, node: NodeId, folder: str, owner: str, content: bytes, /
    ) -> bytes:
        """Let another compute node append `content` to a log, as the log's owner in the tenure
        `owner`. Return the outcomes of the items in `content`, as bytes of
        `indilog_cells.outcomes`.

        Raises:
            IndilogError: the outcomes are unknown.
        """

    async def growth_of(self, nodes: Sequence[NodeId], folder: str, position: int, /) -> bool:
        """Wait until one of the compute nodes says that a log has more than `position` cells.
        False: no node said so within a second.

        Raises:
            OverloadedError: too many calls wait already.
            NotReadyError: the platform has stopped.
        """

    def grew(self, folder: str, position: int, /) -> None:
        """Note that a log has `position` cells; answer the compute nodes whose waits this ends."""
