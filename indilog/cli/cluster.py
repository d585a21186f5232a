"""The commands `indilog cluster`. `init` and `key` make the keys of nodes. `status`, `nodes`,
`shards` and `views` show a running cluster; `scale`, `drain`, `replace`, `finalize` and `rebalance`
change it.

`ClusterHealth` evaluates the status, `indilog.cli.cluster_scale` has the commands that change the
cluster, and a `Gateway` sends the requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from indilog.cli import cluster_scale, show
from indilog.cli.cluster_health import ClusterHealth, ShardHealth
from indilog.cli.gateway import DEFAULT, FAILURE, Gateway, Url, explain_mistakes

cluster = typer.Typer(
    help="Show and change a cluster's nodes and shards; make the keys of its nodes.",
    no_args_is_help=True,
)
cluster.command()(cluster_scale.scale)
cluster.command()(cluster_scale.drain)
cluster.command()(cluster_scale.finalize)
cluster.command()(cluster_scale.rebalance)
cluster.command()(cluster_scale.replace)

Keys = Annotated[Path, typer.Argument(help="The directory of the cluster's keys.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@cluster.command()
def init(
    keys: Keys,
    *,
    node: Annotated[
        list[str] | None, typer.Option("--node", help="Make keys of this node; may be repeated.")
    ] = None,
) -> None:
    """Make the authority of a new cluster, and the keys of its nodes.

    Keep KEYS/authority offline: its holder can make keys of further nodes.
    """
    from indilog.runtime.cluster.cluster_keys import make_authority, make_node_keys

    with explain_mistakes():
        show.line(f"{make_authority(keys)}: the authority; keep it offline.")
        for name in node or ["node"]:
            show.line(f"{make_node_keys(keys, name)}: set node_keys of {name} to a copy of it.")


@cluster.command()
def key(keys: Keys, node: Annotated[str, typer.Argument(help="Name of the node.")]) -> None:
    """Make the keys of one more node of a cluster."""
    from indilog.runtime.cluster.cluster_keys import make_node_keys

    with explain_mistakes():
        show.line(f"{make_node_keys(keys, node)}: set node_keys of {node} to a copy of it.")


@cluster.command()
def status(*, as_json: AsJson = False, url: Url = DEFAULT) -> None:
    """Say whether the cluster is healthy; exit code 1 if it is not."""
    found = _cluster(url)
    health = found.health
    if as_json:
        show.value(_summary(found))
    else:
        show.pairs(_overview(found))
        for sentence in health.heals:
            show.line(f"Heals by itself: {sentence}")
        for sentence in health.needs_operator:
            show.line(f"Needs the operator: {sentence}")
        if health.healthy:
            show.line("healthy")
    if not health.healthy:
        raise typer.Exit(FAILURE)


@cluster.command()
def nodes(*, as_json: AsJson = False, url: Url = DEFAULT) -> None:
    """List the nodes with their roles and states."""
    found = _cluster(url).nodes
    if as_json:
        show.value([node._asdict() for node in found])
    else:
        columns = (
            "node",
            "role",
            "state",
            "position",
            "term",
            "records",
            "bytes",
            "release",
            "zone",
        )
        show.table("Nodes", columns, found)


@cluster.command()
def shards(*, as_json: AsJson = False, url: Url = DEFAULT) -> None:
    """List the shards with their replicas, what these still lack, and which shards have replicas
    that share a zone although there are others.
    """
    cluster = _cluster(url)
    found = cluster.shards
    if as_json:
        show.value([asdict(shard) for shard in found])
        return
    columns = ["shard", "writer", "state", "replicas", "further", "missing records"]
    columns += ["zones"] if cluster.zones else []
    show.table("Shards", columns, [_row(shard)[: len(columns)] for shard in found])
    for sentence in cluster.audit:
        show.line(sentence)


@cluster.command()
def views(*, as_json: AsJson = False, url: Url = DEFAULT) -> None:
    """Show the view: its nodes by role, and the index schedule. There is one view at a time."""
    view = _cluster(url).view
    if as_json:
        show.value(view)
        return
    eras = [f"positions from {e['start']:,}: {_names(e['shards'])}" for e in view["index_eras"]]
    show.pairs(
        {
            "view": f"{view['view']}; there is one view at a time",
            "sequencers": _names(view["sequencers"]),
            "storage nodes": _names(view["storage_nodes"]),
            "spares now": _names(view["spares"]),
            **{
                f"index shard {number}": _names(replicas)
                for number, replicas in view["index_shards"].items()
            },
            **{f"index era {number}": era for number, era in enumerate(eras)},
            "aggregators": _names(view["aggregators"]),
            "compute nodes": _names(view["engines"]),
        }
    )


def _cluster(url: str) -> ClusterHealth:
    return ClusterHealth(Gateway(url).get_with("layout", "/status"))


def _summary(found: ClusterHealth) -> dict[str, Any]:
    health = found.health
    return {
        "healthy": health.healthy,
        "heals": health.heals,
        "needs_operator": health.needs_operator,
        "primary": found.primary,
        "term": found.term,
        "sequencers": len(found.sequencers),
        "sequencers_counting": len(found.sequencers_counting),
        "majority": found.majority,
        "lost_storage_nodes": found.lost,
        "lost_storage_policy": found.lost_storage_policy,
        "silent": sorted(found.silent),
        "shards": _states(found.shards),
        "lost_records": found.lost_records,
        "read_only": found.read_only,
        "releases": found.releases,
    }


def _overview(found: ClusterHealth) -> Mapping[str, str]:
    counting, needed = len(found.sequencers_counting), found.majority
    states = _states(found.shards)
    return {
        "primary": "none" if found.primary is None else f"{found.primary}, term {found.term}",
        "sequencers": f"{counting} of {len(found.sequencers)} count; "
        + (f"a majority ({needed})" if counting >= needed else f"no majority ({needed})"),
        "storage nodes": _count_up(found, found.storage_nodes, "lost"),
        "shards": f"{states['complete']} complete, {states['copying']} being copied, "
        f"{states['lost']} with a lost replica",
        "policy": f"{found.lost_storage_policy}, if appends wait for a lost storage node",
        "index nodes": _count_up(found, found.index_nodes),
        "aggregators": _count_up(found, found.aggregators),
        "compute nodes": _count_up(found, found.engines),
        "lost records": f"{found.lost_records:,}",
        "read-only": "yes" if found.read_only else "no",
        "release": _names(found.releases),
    }


def _states(shards: Iterable[ShardHealth]) -> dict[str, int]:
    states = [shard.state for shard in shards]
    return {state: states.count(state) for state in ("complete", "copying", "lost")}


def _count_up(found: ClusterHealth, nodes: list[str], missing: str = "silent") -> str:
    up = found.up(nodes)
    others = [node for node in nodes if node not in up]
    text = f"{len(up)} of {len(nodes)} up"
    return f"{text}; {missing}: {_names(others)}" if others else text


def _row(shard: ShardHealth) -> tuple[object, ...]:
    missing = [f"{node} {count:,}" for node, count in shard.missing.items()]
    return (
        shard.shard,
        "finalized" if shard.finalized else shard.writer or "-",
        shard.state,
        shard.counting,
        _names(shard.further),
        _names(missing),
        _names(zone or "-" for zone in shard.zones),
    )


def _names(items: Iterable[object]) -> str:
    return ", ".join(map(str, items)) or "-"
