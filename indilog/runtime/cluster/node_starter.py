"""Starts the processes of nodes with a fork server (docs/decisions/0034)."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import structlog

from indilog.runtime.cluster import fork_server
from indilog.runtime.forking.fork_starter import ForkStarter
from indilog.runtime.forking.held_process import Process, executed

_log = structlog.get_logger(__name__)


class NodeStarter:
    """Forks the processes of nodes. If the fork server fails, it starts them by executing their
    commands.

    A child whose fork server did not answer in time ends when its connection to the supervisor
    closes.
    """

    def __init__(self) -> None:
        self._forks = ForkStarter(fork_server.command)

    async def start(
        self, command: Sequence[str], inherited: Sequence[int]
    ) -> tuple[socket.socket, Process]:
        """Start the process of a node; see `Start`."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                return ours, await self._forks.start(command, [theirs.fileno(), *inherited])
            except OSError as error:
                ours.close()
                _log.warning("node is executed, because the fork server failed", reason=str(error))
            except BaseException:
                ours.close()
                raise
        return await executed(command, inherited)

    async def close(self) -> None:
        """End the fork server; the processes that it forked continue. May be called again."""
        await self._forks.close()
