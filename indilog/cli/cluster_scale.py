"""The commands `indilog cluster scale` and `drain`: nodes join and leave a running cluster."""

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


def _conclude(gateway: Gateway, state: Mapping[str, Any], *, wait: bool, timeout: float) -> None:
    """Show what is missing until nothing is; `timeout` is in seconds."""
    deadline = time.monotonic() + timeout
    shown: list[str] = []
    if not state["reached"] and (node := state["gateway"]) not in state["wanted"]["compute_nodes"]:
        show.line(
            f"{node} runs the gateway at {gateway.url}, which closes when its running calls have "
            "ended. Use the gateway of another compute node."
        )
        wait = False
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
