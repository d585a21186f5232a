"""Decides whether this compute node takes a call that another node offers.

`InvokeEndpoint` asks `Offers`, which asks `FunctionHost` for free slots.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from indilog.base.errors import OverloadedError
from indilog_compute.gateway.forwarding.headers import LOAD_HEADER, NodeLoad, deployment_in
from indilog_compute.workers.host import FunctionHost

Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Offers:
    """Takes an offered call only if the call can start here at once, and if the deployment on this
    node is not older than the deployment on the offering node.
    """

    def __init__(self, host: FunctionHost) -> None:
        self._host = host
        self._reserved = 0
        """Number of taken calls whose bodies have not arrived yet."""

    def check(self, name: str, forwarded: bytes, *, is_recorded: bool) -> None:
        """Check that this node takes a call.

        Args:
            name: `app.function`.
            forwarded: value of the header `FORWARDED_HEADER`.
            is_recorded: whether the call is asynchronous or has a key.

        Raises:
            OverloadedError: this node does not take the call; nothing was done.
        """
        wanted, deployed = deployment_in(forwarded), self._host.deployed_at(name)
        if wanted is None or deployed is None or deployed < wanted:
            raise OverloadedError(f"{name} was not taken: this node runs an older deployment.")
        if not self.has_room(name, is_recorded=is_recorded):
            raise OverloadedError(f"{name} was not taken: no slot is free on this node.")

    def has_room(self, name: str, *, is_recorded: bool) -> bool:
        """Whether a call of `name` (`app.function`) would start at once."""
        used = self._reserved + (self._host.recorded_not_started if is_recorded else 0)
        return self._host.free_slots(name) > used

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Reserve a slot while the block receives the body of a taken call."""
        self._reserved += 1
        try:
            yield
        finally:
            self._reserved -= 1

    def with_load(self, send: Send) -> Send:
        """Return an ASGI `send` that adds `LOAD_HEADER` with this node's load to an answer."""

        async def send_with_load(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                calls, slots = self._host.load
                load = NodeLoad(calls + self._reserved, slots).encode()
                message = {**message, "headers": [*message["headers"], (LOAD_HEADER, load)]}
            await send(message)

        return send_with_load
