"""Chooses the port of each gateway, if the engines of a machine are separate processes.

`engine-0` gets the configured port, and `engine-N` the N-th port after it. If the configured port
is 0, the system chooses a port at the first start of the engine's process in a run. A restart of
the process uses the same port, so its URL stays valid. `node_process` chooses and stores the port,
and the supervisor frees it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from indilog.base.ids import NodeId
from indilog.runtime.cluster.membership import number_of


class GatewayPort(NamedTuple):
    """The port of one gateway, and the reason for a port that is not the configured one.

    Attributes:
        port: the port; 0: the system chooses one.
        words: the rule that chose the port, for people; empty: the port is the configured one.
        added: number that is also added to all other configured ports of this gateway.
    """

    port: int
    words: str
    added: int = 0


def port_of(directory: Path, name: NodeId, configured: int) -> GatewayPort:
    """Return the port of the engine `name` in the run of `directory`."""
    index = number_of(name)
    if configured:
        words = f" (port + {index} for {name})" if index else ""
        return GatewayPort(configured + index, words, index)
    try:
        chosen = int(_path(directory, name).read_text())
    except OSError:
        return GatewayPort(0, "", index)
    return GatewayPort(chosen, f" (chosen for {name} at its first start)", index)


def keep_port(directory: Path, name: NodeId, port: int) -> None:
    """Store `port` for later calls of `port_of` in this run, if the configured port is 0.

    Raises:
        OSError: the port cannot be written.
    """
    path = _path(directory, name)
    whole = path.with_suffix(".port-new")
    whole.write_text(str(port))
    whole.replace(path)


def free_port(directory: Path, name: NodeId) -> None:
    """Remove the stored port of an engine that has left the cluster."""
    _path(directory, name).unlink(missing_ok=True)


def _path(directory: Path, name: NodeId) -> Path:
    return directory / f"{name}.port"
