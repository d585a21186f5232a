"""The commands `indilog cluster scale`, `drain`, `replace`, `finalize` and `rebalance`: nodes join
and leave a running cluster, and shards end or move.

`indilog.cli.cluster` adds the commands to its group. Each command sends a request below `/cluster`
to a `Gateway`, and by default waits until the cluster has changed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from indilog.cli import show
from indilog.cli.gateway import DEFAULT, FAILURE, Gateway, Url, stop

_PATH: Final = "/cluster/members"
_POLL_S: Final = 0.3
_WAIT_S: Final = 600.0

Wait = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait until the cluster has these nodes.")
]
Timeout = Annotated[float, typer.Option(min=0.0, help="Seconds to wait at most.")]
Count = Annotated[int | None, typer.Option(show_default="as many as now")]


def scale(
    *,
    nodes: Annotated[
        int | None, typer.Option(show_default="as many as now", help="Of `up --nodes` only.")
    ] = None,
    compute_nodes: Count = None,
    storage_nodes: Count = None,
    index_shards: Count = None,
    index_replicas: Count = None,
    aggregators: Count = None,
    wait: Wait = True,
    timeout: Timeout = _WAIT_S,
    url: Url = DEFAULT,
) -> None:
    """Change how many nodes the running cluster has.

    Nodes with the greatest numbers leave first. The cluster serves calls meanwhile.
    """
    given = {
        "nodes": nodes,
        "compute_nodes": compute_nodes,
        "storage_nodes": storage_nodes,
        "index_shards": index_shards,
        "index_replicas": index_replicas,
        "aggregators": aggregators,
    }
    counts = {name: count for name, count in given.items() if count is not None}
    if not counts:
        stop("Say what to change, such as --storage-nodes 4.")
    gateway = Gateway(url)
    _conclude(gateway, gateway.put(_PATH, json=counts), wait=wait, timeout=timeout)


def drain(
    node: Annotated[
        str, typer.Argument(help="A compute node, a storage node, or a node of `up --nodes`.")
    ],
    *,
    wait: Wait = True,
    timeout: Timeout = _WAIT_S,
    url: Url = DEFAULT,
) -> None:
    """Let a compute node, a storage node, or all nodes of a process leave the running cluster.

    A storage node leaves when other nodes have copies of all its records. A compute node finishes
    its running calls. The command does not wait for the compute node whose gateway it calls.
    """
    gateway = Gateway(url)
    answer = gateway.delete(f"{_PATH}/{quote(node, safe='')}")
    _conclude(gateway, answer, wait=wait, timeout=timeout)


def replace(
    node: Annotated[
        str, typer.Argument(help="A process: a node of `up --nodes`, or a compute or storage node.")
    ],
    *,
    wait: Wait = True,
    timeout: Timeout = _WAIT_S,
    url: Url = DEFAULT,
) -> None:
    """Give up a process that is gone permanently, and start another one in its place.

    It is ended if it runs, and not started again. Its disk is not needed: what it had is copied
    from other nodes.
    """
    gateway = Gateway(url)
    answer = gateway.post(f"{_PATH}/{quote(node, safe='')}/replace")
    _conclude(gateway, answer, wait=wait, timeout=timeout)


def finalize(
    shard: Annotated[int, typer.Argument(help="Number of the shard.")],
    *,
    cuts: Annotated[
        int, typer.Option(min=0, max=1_000_000, help="Committed cuts of grace; 0: none.")
    ] = 10,
    wait: Wait = True,
    timeout: Timeout = _WAIT_S,
    url: Url = DEFAULT,
) -> None:
    """Let a shard get no further records; its compute node continues on a new shard.

    Appends continue. Records of the shard that are not ordered by then go to the new shard, each
    once.
    """
    gateway = Gateway(url)
    state = gateway.post(f"/cluster/shards/{shard}/finalize", json={"cuts": cuts})
    _await_reached(gateway, state, wait=wait, timeout=timeout)
    if wait:
        found = gateway.get("/status")["shards"]
        writers = [f"{of['writer']} writes {n}" for n, of in found.items() if of["writer"]]
        show.line(f"Shard {shard} is finalized. Of the shards, {', '.join(writers)}.")


def rebalance(*, wait: Wait = True, timeout: Timeout = _WAIT_S, url: Url = DEFAULT) -> None:
    """Spread the replicas of shards evenly over the storage nodes and their zones.

    Records are copied while the cluster serves calls, at most `repair_bytes_per_s` at each node.
    """
    gateway = Gateway(url)
    state = gateway.post("/cluster/rebalance")
    state = _await_reached(gateway, state, wait=wait, timeout=timeout)
    if state["reached"]:
        show.line("The replicas are spread evenly: `indilog cluster shards` shows them.")


def _conclude(gateway: Gateway, state: Mapping[str, Any], *, wait: bool, timeout: float) -> None:
    """Wait until the cluster has the wanted nodes, and show them; `timeout` is in seconds."""
    if not state["reached"] and (node := state["gateway"]) not in state["wanted"]["compute_nodes"]:
        show.line(
            f"{node} runs the gateway at {gateway.url}, which closes when its running calls have "
            "ended. Use the gateway of another compute node."
        )
        wait = False
    state = _await_reached(gateway, state, wait=wait, timeout=timeout)
    installed = state["installed" if state["reached"] else "wanted"]
    index_nodes = [node for replicas in installed["index_shards"] for node in replicas]
    show.pairs(
        {
            "view": f"{state['view']}" + ("" if state["reached"] else "; these are wanted:"),
            "sequencers": ", ".join(installed["sequencers"]),
            "compute nodes": ", ".join(installed["compute_nodes"]),
            "storage nodes": ", ".join(installed["storage_nodes"]),
            "index nodes": ", ".join(index_nodes),
            "aggregators": ", ".join(installed["aggregators"]) or "-",
        }
    )


def _await_reached(
    gateway: Gateway, state: Mapping[str, Any], *, wait: bool, timeout: float
) -> Mapping[str, Any]:
    """If `wait`, show what is missing until nothing is. Return the newest state of the cluster."""
    deadline = time.monotonic() + timeout
    shown: list[str] = []
    while not state["reached"] and wait:
        if state["missing"] != shown:
            shown = state["missing"]
            for sentence in shown:
                show.line(sentence)
        if time.monotonic() >= deadline:
            stop(
                f"After {timeout:g} s the cluster does not have these nodes yet: "
                f"{' '.join(shown)} It continues by itself; `indilog cluster views` shows it.",
                FAILURE,
            )
        time.sleep(_POLL_S)
        state = gateway.get(_PATH)
    return state
