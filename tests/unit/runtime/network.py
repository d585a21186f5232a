"""Transports of one test on one event loop, and receivers that wait for frames."""

from __future__ import annotations

import asyncio
import copy
import functools
import random
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Final, Generic, TypeVar

import uvloop

from indilog.base.ids import NodeId
from indilog.config import Config, node_config
from indilog.config.node import GROUP_OF
from indilog.runtime.transport.stream_transport import StreamTransport
from indilog.runtime.transport.zmq_transport import ZmqTransport

CONFIG: Final = Config(node=node_config(send_queue_s_max=100.0))
"""No frame is too old unless a test sets the time at which it was sent."""
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")

_SCHEMES: Final = {"StreamTransport": ("stream", "unix"), "ZmqTransport": ("tcp", "ipc")}
"""Address forms: a TCP port, and a Unix socket."""

TransportT = TypeVar("TransportT", StreamTransport, ZmqTransport)


def on_uvloop(
    test: Callable[..., Coroutine[object, object, None]],
) -> Callable[..., None]:
    """Run a test on the platform's event loop, and close its transports while the loop still
    runs.
    """

    @functools.wraps(test)
    def run(**fixtures: object) -> None:
        async def whole() -> None:
            try:
                async with asyncio.timeout(60):
                    await test(**fixtures)
            finally:
                for network in fixtures.values():
                    if isinstance(network, Network):
                        network.close()

        uvloop.run(whole())

    return run


async def until(condition: Callable[[], bool]) -> None:
    """Run the loop until `condition` holds."""
    while not condition():  # noqa: ASYNC110 - only the sockets know
        await asyncio.sleep(0)


class Inbox:
    """Collects frames, and lets a test wait for them."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.lists = 0
        """Number of lists in which the frames came."""
        self._came = asyncio.Event()

    def take(self, frames: list[bytes]) -> None:
        assert frames, "an empty list is never delivered"
        self.frames += frames
        self.lists += 1
        self._came.set()

    async def until(self, count: int) -> list[bytes]:
        while len(self.frames) < count:
            self._came.clear()
            await self._came.wait()
        return self.frames


class Network(Generic[TransportT]):
    """Transports of one kind, closed at the end of their test; `b` and `c` share an address.

    With `keys` they use TCP ports, and authenticate each other.
    """

    def __init__(self, kind: type[TransportT], directory: Path, keys: Path | None = None) -> None:
        self._kind: type[TransportT] = kind
        self._directory = directory
        self._keys = keys
        self._host = f"127.{'.'.join(str(random.randint(1, 254)) for _ in range(3))}"
        """A host of its own on loopback, so that nothing else takes a port that was just free."""
        self._port_scheme, self._scheme = _SCHEMES[kind.__name__]
        self.addresses = {node: self.new_address(node) for node in (A, B)}
        self.addresses[C] = self.addresses[B]
        self._open: list[TransportT] = []

    def new_address(self, name: str) -> str:
        """Return an address at which nothing receives."""
        if self._keys is None:
            return f"{self._scheme}://{self._directory}/{name}"
        return f"stream://{self._host}:{self._free_port()}"

    def _free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind((self._host, 0))
            port: int = probe.getsockname()[1]
            return port

    def transport(self, node: NodeId, config: Config = CONFIG) -> TransportT:
        loop = asyncio.get_running_loop()
        if self._keys is not None:
            config = copy.deepcopy(config)
            object.__setattr__(config.node.messages, "node_keys", self._keys)
        made: TransportT = self._kind(self.addresses[node], self.addresses, loop, config)
        self._open.append(made)
        return made

    def receiving(self, node: NodeId, config: Config = CONFIG) -> tuple[TransportT, Inbox]:
        transport, inbox = self.transport(node, config), Inbox()
        transport.start(inbox.take)
        return transport, inbox

    def at_port(self) -> tuple[str, int]:
        """Have `b` and `c` receive at a TCP port; return its host and number."""
        place = self._host, self._free_port()
        self.addresses[B] = self.addresses[C] = f"{self._port_scheme}://{place[0]}:{place[1]}"
        return place

    def close(self) -> None:
        for made in self._open:
            made.close()


def limited(**limits: int) -> Config:
    """Return a configuration with small limits that its cross-checks would not allow."""
    config = copy.deepcopy(CONFIG)
    for name, limit in limits.items():
        group = GROUP_OF.get(name)
        part = config.cluster if group is None else getattr(config.node, group)
        assert hasattr(part, name), "there is such a limit"
        object.__setattr__(part, name, limit)
    return config
