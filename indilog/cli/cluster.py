"""The commands `indilog cluster init | key`: the keys of a cluster's nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from indilog.cli import show
from indilog.cli.gateway import explain_mistakes

cluster = typer.Typer(help="Make the keys of a cluster's nodes.", no_args_is_help=True)

Keys = Annotated[Path, typer.Argument(help="The directory of the cluster's keys.")]


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
