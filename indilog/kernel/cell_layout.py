"""The layout of a log over cells of storage nodes: which nodes keep which cell (decision 0085;
CORFU 2.2, where it is a *projection*).

The cell at position p belongs to chain p modulo the number of chains. A chain is a sequence of
replicas; the first one is its head. All replicas of a chain keep all of its cells. A layout is
never changed; another one with a greater epoch replaces it.

A log of kind `owned` has one chain, whose replicas are written at once. An acknowledged cell may be
missing on some of them; `CellLayout.lacking` says on how many (decision 0090).

`indilog_cells` reads and changes layouts; the catalog of logs (`indilog_compute.log_kinds`) stores
them.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from typing import Final, TypeAlias

import msgspec

from indilog.base.ids import NodeId
from indilog.base.log_kinds import ORDER_FIRST, STRIPES_MAX

CHAINS_MAX: Final = STRIPES_MAX[ORDER_FIRST]
"""Chains of a log."""


class CellReplica(msgspec.Struct, frozen=True, array_like=True):
    """A replica of a chain.

    Attributes:
        node: the storage node.
        space: the space of the cells on the node. A node that returns to a log gets a new space,
            so what it kept before is not taken for a replica.
        is_filling: whether the replica may still lack cells that the other replicas have.
    """

    node: NodeId
    space: str
    is_filling: bool = False


Chain: TypeAlias = tuple[CellReplica, ...]


class CellLayout(msgspec.Struct, frozen=True, array_like=True):
    """A layout.

    Attributes:
        epoch: its number. A storage node that is sealed for this epoch refuses requests of smaller
            epochs.
        chains: the chains. Replicas that are filling come last in each, after complete ones.
        owner: the process that appends to a log of kind `owned`; empty: none yet.
        lacking: on how many complete replicas of a chain an acknowledged cell may be missing. So
            any `lacking + 1` complete replicas together have every acknowledged cell.
    """

    epoch: int
    chains: tuple[Chain, ...]
    owner: str = ""
    lacking: int = 0

    def chain(self, position: int) -> Chain:
        """Return the chain of a position."""
        return self.chains[position % len(self.chains)]

    @property
    def replicas(self) -> frozenset[tuple[NodeId, str]]:
        """The node and the space of each replica."""
        return frozenset((each.node, each.space) for chain in self.chains for each in chain)

    @property
    def is_filling(self) -> bool:
        """Whether a replica is filling."""
        return any(each.is_filling for chain in self.chains for each in chain)

    def filled(self, epoch: int) -> CellLayout:
        """Return the layout after all replicas were filled."""
        chains = tuple(
            tuple(CellReplica(each.node, each.space) for each in chain) for chain in self.chains
        )
        return CellLayout(epoch, chains, self.owner, self.lacking)

    @property
    def complete(self) -> Chain:
        """The complete replicas of the only chain of a log of kind `owned`."""
        (chain,) = self.chains
        return complete_of(chain)

    @property
    def ack_quorum(self) -> int:
        """How many complete replicas must have a cell before it is acknowledged: most of them, and
        all but `lacking`.
        """
        count = len(self.complete)
        return max(count - self.lacking, count // 2 + 1)

    @property
    def read_quorum(self) -> int:
        """How many complete replicas must answer that a cell is unwritten before it counts as
        unwritten. At least one of them has the cell if it was acknowledged, and at least one of
        them took part in any seal of `lacking + 1` replicas.
        """
        return max(len(self.complete) - self.lacking, self.lacking + 1)


def complete_of(chain: Chain) -> Chain:
    """Return the complete replicas of a chain."""
    return tuple(each for each in chain if not each.is_filling)


def full_nodes(layout: CellLayout, full: Collection[NodeId]) -> Sequence[NodeId]:
    """Return the nodes with full disks, if some chain cannot take cells because of them.

    A log without `lacking` needs all replicas of a chain. Else as many complete ones may be full as
    are not needed for the ack quorum.

    Args:
        layout: the layout.
        full: all nodes with full disks.
    """
    found: set[NodeId] = set()
    for chain in layout.chains:
        needed = complete_of(chain) if layout.lacking else chain
        spare = len(needed) - layout.ack_quorum if layout.lacking else 0
        there = [each.node for each in needed if each.node in full]
        if len(there) > spare:
            found.update(there)
    return sorted(found)


def lacking_of(copies: int) -> int:
    """Return `CellLayout.lacking` if a cell is acknowledged on a majority of `copies` replicas."""
    return (copies - 1) // 2


def new_layout(
    folder: str, nodes: Sequence[NodeId], copies: int, stripes: int | None = None
) -> CellLayout:
    """Return the first layout of a log of kind `order-first`: the nodes are heads round robin.

    Args:
        folder: a name of the log that no other log has.
        nodes: at least one storage node.
        copies: replicas of a chain; fewer if there are fewer nodes.
        stripes: number of chains; None: one for each node, up to `CHAINS_MAX`.
    """
    count = min(len(nodes), CHAINS_MAX) if stripes is None else stripes
    # If not every node is a head, the CRC spreads the heads of several logs over the nodes.
    first = zlib.crc32(folder.encode()) if count < len(nodes) else 0
    chains = [_new_chain(folder, nodes, copies, first + at) for at in range(count)]
    return CellLayout(1, tuple(chains))


def owned_layout(folder: str, nodes: Sequence[NodeId], copies: int) -> CellLayout:
    """Return the first layout of a log of kind `owned`: one chain. The CRC of `folder` chooses its
    head, so that logs spread over the nodes.

    Args:
        folder: a name of the log that no other log has.
        nodes: at least one storage node.
        copies: replicas; fewer if there are fewer nodes.
    """
    chain = _new_chain(folder, nodes, copies, zlib.crc32(folder.encode()))
    return CellLayout(1, (chain,), "", lacking_of(len(chain)))


def _new_chain(folder: str, nodes: Sequence[NodeId], copies: int, head: int) -> Chain:
    """Return a chain that begins at `nodes[head modulo their number]`."""
    copies = min(copies, len(nodes))
    return tuple(_replica(nodes[(head + n) % len(nodes)], folder, 1) for n in range(copies))


def repaired(
    layout: CellLayout,
    folder: str,
    epoch: int,
    *,
    sealed: Collection[tuple[NodeId, str]],
    available: Collection[NodeId],
    opened: Sequence[NodeId],
    copies: int,
) -> CellLayout | None:
    """Return the next layout. It leaves out replicas that are not sealed, and adds replicas on
    other nodes, which are filling at first. None: a chain has so few complete replicas left that
    all of them might lack an acknowledged cell.

    If the node of a sealed replica is not available, the replica stays until enough others are
    complete.

    Args:
        layout: the layout before.
        folder: as in `new_layout`.
        epoch: epoch of the next layout.
        sealed: nodes and spaces of `layout` that are sealed for `epoch`.
        available: nodes that may keep replicas.
        opened: available nodes that have opened a space for `epoch`.
        copies: replicas that a chain should have, if there are so many nodes.
    """
    load: dict[NodeId, int] = dict.fromkeys(opened, 0)
    kept = [tuple(r for r in chain if (r.node, r.space) in sealed) for chain in layout.chains]
    if any(len(complete_of(chain)) <= layout.lacking for chain in kept):
        return None
    for chain in kept:
        for each in chain:
            if each.node in load:
                load[each.node] += 1
    chains: list[Chain] = []
    for chain in kept:
        staying = tuple(each for each in chain if each.node in available)
        complete = complete_of(staying)[:copies]
        if len(complete) == min(copies, len(available)) > 0:
            chains.append(complete)
            continue
        members = {each.node for each in chain}
        others = sorted((node for node in load if node not in members), key=load.__getitem__)
        added = others[: max(0, copies - len(staying))]
        for node in added:
            load[node] += 1
        new = (_replica(node, folder, epoch, is_filling=True) for node in added)
        chains.append((*chain, *new))
    return CellLayout(epoch, tuple(chains), layout.owner, layout.lacking)


def space_of(folder: str, epoch: int) -> str:
    """Return the name of the space of replicas that join a log in the layout of `epoch`."""
    return f"{spaces_of(folder)}{epoch}"


def spaces_of(folder: str) -> str:
    """Return how the names of all spaces of a log begin. Those of no other log begin like that,
    because a folder has no `@`.
    """
    return f"{folder}@"


def _replica(node: NodeId, folder: str, epoch: int, *, is_filling: bool = False) -> CellReplica:
    return CellReplica(node, space_of(folder, epoch), is_filling)
