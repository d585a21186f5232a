"""Lets the nemesis reach into the processes of its cluster (`tests/nemesis`).

Python imports it at the start of every process that has this folder in `PYTHONPATH`.

- The wall clock is ahead by the number of seconds in the file `clock`, which may change.
- Nodes dial the socket of a proxy instead of another node's socket.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from pathlib import Path

_DIRECTORY = os.environ.get("TESTS_NEMESIS", "")
_wall = time.time


def _turn_clock(file: Path) -> None:
    with file.open("rb") as opened:
        ahead = mmap.mmap(opened.fileno(), 8, prot=mmap.PROT_READ)
    unpacked = struct.Struct("<d").unpack_from
    time.time = lambda: _wall() + float(unpacked(ahead)[0])


def _dial_proxies(directory: Path) -> None:
    from indilog.runtime.transport.stream_address import StreamAddress

    direct = StreamAddress.connect

    async def connect(self: StreamAddress, loop, protocol, tls=None) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
        proxy = directory / (Path(self.path).name if self.path else f"port-{self.port}")
        to = self._replace(path=str(proxy)) if proxy.exists() else self
        await direct(to, loop, protocol, tls)

    StreamAddress.connect = connect  # type: ignore[method-assign]


if _DIRECTORY:
    _turn_clock(Path(_DIRECTORY) / "clock")
    _program = " ".join(sys.orig_argv[1:4])
    if any(name in _program for name in ("fork_server", "indilog.node", "indilog node")):
        _dial_proxies(Path(_DIRECTORY) / "proxy")
