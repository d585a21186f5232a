"""Evaluates the status of a platform (`GET /status`) for `indilog cluster`: nodes, shards, the
view, and problems.

A node is *silent* if its process has ended, or has not published a status for 10 s. A storage node
is *lost* if the primary gets no heartbeats from it (`storage_lost_s`); its process may still run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

from indilog.base.ids import NodeId
from indilog.kernel.zones import shares_zones


class NodeHealth(NamedTuple):
    """One node. A field is None if the status does not have its value."""

    node: str
    role: str
    state: Literal["running", "silent", "lost"]
    position: int | None
    """Number of metalog entries that the node has applied; of a sequencer: that are committed."""
    term: int | None
    records: int | None
    bytes: int | None
    release: str | None
    zone: str


@dataclass(frozen=True)
class ShardHealth:
    """The replicas of one shard, and what they still lack."""

    shard: int
    writer: str
    state: Literal["complete", "copying", "lost"]
    counting: list[str]
    """The replicas whose reports decide what is ordered."""
    further: list[str]
    """Replicas that are kept until the counting replicas have every record."""
    missing: dict[str, int]
    """The number of records that each counting replica still lacks."""
    lost: list[str]
    """The counting replicas that are lost or silent."""
    zones: list[str]
    """The zone of each counting replica; empty: there are no zones."""
    shares_zone: bool
    """Whether counting replicas share a zone although storage nodes of other zones exist."""
    finalized: bool
    """Whether it gets no further records."""


@dataclass(frozen=True)
class Health:
    """What is wrong with a cluster, in whole sentences."""

    heals: list[str]
    """What the platform repairs by itself."""
    needs_operator: list[str]
    """What stays until the operator does something."""

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.heals or self.needs_operator)


class ClusterHealth:
    """A cluster as one status shows it.

    Args:
        status: the answer of `GET /status`.
    """

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status
        self._figures: Mapping[str, Mapping[str, Any]] = status["nodes"]
        layout = status["layout"]
        self.sequencers: list[str] = layout["sequencers"]
        self.storage_nodes: list[str] = layout["storage_nodes"]
        self.index_nodes: list[str] = [*chain(*layout["index_shards"].values())]
        self.aggregators: list[str] = layout["aggregators"]
        self.engines: list[str] = layout["engines"]
        self.lost_storage_policy: str = layout["lost_storage_policy"]
        self.silent = frozenset[str](status["silent"])
        self.zones: dict[str, str] = layout["zones"]

    # --- the metalog

    @property
    def primary(self) -> str | None:
        """The primary of the newest term; None: no sequencer that runs is a primary."""
        leading = [node for node in self.sequencers if "tail" in self._figures.get(node, {})]
        return max(leading, key=lambda node: self._figures[node]["term"], default=None)

    @property
    def term(self) -> int | None:
        """The term of the primary."""
        return None if (primary := self.primary) is None else self._figures[primary]["term"]

    @property
    def sequencers_counting(self) -> list[str]:
        """The sequencers that run and may have lost no entry (`learner` is 0)."""
        figures = self._figures
        return [n for n in self.sequencers if n in figures and not figures[n]["learner"]]

    @property
    def majority(self) -> int:
        """How many sequencers must count."""
        return len(self.sequencers) // 2 + 1

    # --- storage

    @property
    def lost(self) -> list[str]:
        """The storage nodes that count as lost at the primary, or that are silent."""
        primary = self.primary
        lost = self._figures[primary]["lost_storage_nodes"] if primary is not None else []
        return [node for node in self.storage_nodes if node in lost or node in self.silent]

    @property
    def spares(self) -> list[str]:
        """The storage nodes that no shard uses now."""
        used = {n for shard in self._status["shards"].values() for n in shard["replicas"]}
        return [node for node in self.storage_nodes if node not in used]

    @property
    def shards(self) -> list[ShardHealth]:
        """All shards, ascending."""
        found = self._status["shards"]
        return [self._shard(name, found[name]) for name in sorted(found, key=int)]

    def _shard(self, name: str, found: Mapping[str, Any]) -> ShardHealth:
        counting = found["counting"]
        further = [node for node in found["replicas"] if node not in counting]
        missing = {
            node: count
            for node in counting
            if (count := self._figures.get(node, {}).get("missing_by_shard", {}).get(name))
        }
        lost = [node for node in counting if node in self.lost]
        return ShardHealth(
            shard=int(name),
            writer=found["writer"],
            state="lost" if lost else "copying" if further or missing else "complete",
            counting=counting,
            further=further,
            missing=missing,
            lost=lost,
            finalized=found["finalized"],
            zones=[self.zones.get(node, "") for node in counting] if self.zones else [],
            shares_zone=shares_zones(
                [NodeId(node) for node in counting], map(NodeId, self.storage_nodes), self._zones
            ),
        )

    @property
    def _zones(self) -> dict[NodeId, str]:
        return {NodeId(node): zone for node, zone in self.zones.items()}

    @property
    def audit(self) -> list[str]:
        """A sentence for each shard whose replicas share a zone although other zones exist."""
        return [
            f"The replicas of shard {shard.shard} are in {_zones_counted(shard.zones)}, and "
            "there are storage nodes in other zones."
            for shard in self.shards
            if shard.shares_zone
        ]

    # --- nodes

    @property
    def nodes(self) -> list[NodeHealth]:
        """All nodes, by role."""
        roles = (
            ("sequencer", self.sequencers),
            ("storage", self.storage_nodes),
            ("index", self.index_nodes),
            ("aggregator", self.aggregators),
            ("compute", self.engines),
        )
        return [self._node(node, role) for role, nodes in roles for node in nodes]

    def _node(self, node: str, role: str) -> NodeHealth:
        figures = self._figures.get(node, {})
        if node == self._answering:
            figures = self._status["engine"]["progress"]
        lost = role == "storage" and node in self.lost
        return NodeHealth(
            node=node,
            role="primary" if node == self.primary else role,
            state="silent" if node in self.silent else "lost" if lost else "running",
            position=figures.get("committed" if role == "sequencer" else "position"),
            term=figures.get("term"),
            records=figures.get("records"),
            bytes=figures.get("bytes"),
            release=self._release_of(node),
            zone=self.zones.get(node, ""),
        )

    def _release_of(self, node: str) -> str | None:
        """Return the version of IndiLog that a node runs; None: the status does not have it."""
        of_node = self._status if node not in self._status["elsewhere"] else self._figures.get(node)
        return None if of_node is None else of_node.get("release")

    @property
    def releases(self) -> list[str]:
        """The versions that the nodes run; more than one during a rolling upgrade."""
        return sorted({node.release for node in self.nodes if node.release is not None})

    @property
    def _answering(self) -> str | None:
        """The compute node that answered."""
        elsewhere = self._status["elsewhere"]
        return next((node for node in self.engines if node not in elsewhere), None)

    def up(self, nodes: Iterable[str]) -> list[str]:
        """Return the nodes among `nodes` that are up: neither silent nor lost."""
        return [node for node in nodes if node not in self.silent and node not in self.lost]

    # --- the view

    @property
    def view(self) -> dict[str, Any]:
        """The view's number and nodes, the eras of its index schedule, and spares."""
        return {"view": self._status["view"], **self._status["layout"], "spares": self.spares}

    # --- what is wrong

    @property
    def lost_records(self) -> int:
        """How many records are permanently lost."""
        return int(self._status["lost_records"])

    @property
    def read_only(self) -> bool:
        """Whether a full disk prevents appends."""
        return bool(self._status["read_only"])

    @property
    def health(self) -> Health:
        """What is wrong, and who repairs it."""
        health = Health([], [])
        self._judge_sequencers(health)
        self._judge_shards(health)
        self._judge_logs(health)
        others = self.sequencers + self.index_nodes + self.aggregators + self.engines
        silent = [node for node in others if node in self.silent]
        used = {node for shard in self.shards for node in shard.lost}
        silent += [node for node in self.lost if node not in used]
        if silent:
            health.heals.append(
                f"No heartbeat of {_names(silent)}: the supervisor, or systemd, restarts a "
                "process that ended or hangs."
            )
        if not self._status["ready"]:
            health.needs_operator.append(
                f"{self._answering} has failed: read platform.log, and restart it."
            )
        if self.read_only:
            health.needs_operator.append("A disk is full: free space; appends then continue.")
        if self.lost_records:
            health.needs_operator.append(
                f"{self.lost_records:,} records are lost permanently: `warning` in "
                "`indilog status` says where."
            )
        return health

    def _judge_sequencers(self, health: Health) -> None:
        counting, all_ = self.sequencers_counting, self.sequencers
        if len(counting) < self.majority:
            health.needs_operator.append(
                f"Only {len(counting)} of {len(all_)} sequencers count, and appends need "
                f"{self.majority}: bring the others back, with their disks, unless the supervisor "
                "does."
            )
            return
        if learners := [n for n in all_ if n in self._figures and n not in counting]:
            health.heals.append(f"{_names(learners)} fetches the metalog entries that it lacks.")
        if self.primary is None:
            health.heals.append("There is no primary: a sequencer takes over.")

    def _judge_shards(self, health: Health) -> None:
        moves = len(self.sequencers) > 1
        for shard in self.shards:
            others = [node for node in self.storage_nodes if node not in shard.counting]
            spares = self.up(others) if moves else []
            if shard.lost and spares:
                adds = self.lost_storage_policy == "finalize_add" and not shard.finalized
                also = ", and if appends wait, its compute node gets a new shard" if adds else ""
                health.heals.append(
                    f"Shard {shard.shard} has lost {_names(shard.lost)}: it gets another "
                    f"replica{also}."
                )
            elif shard.lost:
                health.needs_operator.append(
                    f"Shard {shard.shard} has lost {_names(shard.lost)}, and no spare can replace "
                    "it: bring it back, with its disk, unless the supervisor does."
                )
            elif shard.state == "copying":
                left = sum(shard.missing.values())
                known = f"; {left:,} records are missing" if left else ""
                health.heals.append(f"Shard {shard.shard} is being copied{known}.")

    def _judge_logs(self, health: Health) -> None:
        found = self._status  # an earlier release does not say
        for log, nodes in found.get("filling", {}).items():
            health.heals.append(f"Log {log} is being copied to {_names(nodes)}.")
        for log, failure in found.get("failing", {}).items():
            why = f"Log {log} cannot be used: {failure.rstrip('.')}"
            if self.lost:
                health.heals.append(f"{why}; this may end when a lost storage node is replaced.")
            else:
                health.needs_operator.append(f"{why}. See that its storage is there and works.")


def _zones_counted(zones: list[str]) -> str:
    return ", ".join(
        f"zone {zone or 'without a name'} ({zones.count(zone)})" for zone in dict.fromkeys(zones)
    )


def _names(nodes: Iterable[str]) -> str:
    return ", ".join(nodes)
