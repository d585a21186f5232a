"""The port of a gateway that was told to take any: chosen at the first start of its process in a
run, the same one again when the process is started again, so that its URL holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from indilog.ids import NodeId


def port_chosen(directory: Path, name: NodeId) -> int:
    """Return the port that the engine `name` has chosen in the run of `directory`; 0: none yet."""
    try:
        text = _path(directory, name).read_text()
    except OSError:
        return 0
    return int(text)


def keep_port(directory: Path, name: NodeId, port: int) -> None:
    """Have `port_chosen` return `port` as long as the run goes on.

    Raises:
        OSError: it cannot be written.
    """
    path = _path(directory, name)
    whole = path.with_suffix(".port-new")
    whole.write_text(str(port))
    whole.replace(path)


def words_for_port(configured: int, engines: Sequence[NodeId], name: NodeId) -> str:
    """Say which sum the port of the engine `name` is, if it is not the one that is configured."""
    index = engines.index(name)
    return f" (port + {index} for {name})" if configured and index else ""


def _path(directory: Path, name: NodeId) -> Path:
    return directory / f"{name}.port"
