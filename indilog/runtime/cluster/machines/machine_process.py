"""Runs the process of one machine of a cluster: `indilog node` (decision 0057).

The process has a gateway and the nodes of its roles. After the first SIGTERM, the running calls of
the gateway end, then the gateway, and then the process. If the process fails, systemd or another
program must restart it. The command line calls `run_machine`, which uses the other modules of this
package and `node_process.nodes_running`.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import shutil
import signal
from collections.abc import Callable, Collection, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import structlog
import uvloop

from indilog.base.errors import ConfigError
from indilog.config import Config
from indilog.runtime.cluster.assembly import (
    calls_served,
    logs_of,
    peers_on_machines,
    wait_for_metalog,
)
from indilog.runtime.cluster.following import running
from indilog.runtime.cluster.gateway_port import GatewayPort
from indilog.runtime.cluster.machines.machine_members import (
    MachineMembers,
    Membership,
    install_without,
    remove_gone,
    want_joined,
    want_zone,
)
from indilog.runtime.cluster.machines.registration import machine_start, registered
from indilog.runtime.cluster.machines.service_manager import (
    READY,
    STOPPING,
    notify,
    report_life,
    watchdog_s,
)
from indilog.runtime.cluster.machines.status_keys import StatusKeys
from indilog.runtime.cluster.membership import Kind
from indilog.runtime.cluster.metadata_opening import OpenedMetadata, opened_metadata
from indilog.runtime.cluster.node_process import (
    RunningNode,
    nodes_running,
    status_of_process,
)
from indilog.runtime.cluster.status_files import publish_status
from indilog.runtime.cluster.token_file import TOKEN_FILE
from indilog.runtime.descriptors import raise_limit

ROLES: Final[dict[str, Kind]] = {
    "sequencer": "sequencer",
    "storage": "storage",
    "index": "index",
    "aggregator": "aggregator",
    "compute": "engine",
}
"""The roles that a machine may have when it joins. Its sequencer is a standby, which may take the
place of a leaving sequencer.
"""
_MACHINES_MIN: Final = 3
"""Smallest number of machines. With fewer, the loss of one machine stops the cluster."""

_log = structlog.get_logger(__name__)


def roles_named(text: str) -> tuple[Kind, ...]:
    """Return the kinds of nodes for the roles in `text`, which commas separate.

    Raises:
        ConfigError: there is no such role.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in ROLES]:
        raise ConfigError(
            f"There is no role {unknown[0]!r} for a machine that joins; the roles are "
            f"{', '.join(ROLES)}."
        )
    if not names:
        raise ConfigError(f"Name at least one role of {', '.join(ROLES)}.")
    return tuple(dict.fromkeys(ROLES[name] for name in names))


def run_machine(
    config: Config, roles: Collection[Kind], on_ready: Callable[[str, str], None]
) -> None:
    """Run the process of this machine until SIGTERM or SIGINT, or until its nodes have left the
    cluster.

    Args:
        config: configuration of this machine; `[cluster]` is the same on all machines.
        roles: the kinds of nodes of the process. They are used only if the process joins a cluster
            that already has its first processes.
        on_ready: called with the name of the process and the URL of its gateway. The URL is empty
            if the process has no gateway.

    Raises:
        ConfigError: the configuration does not fit the cluster, or the process has left it.
        IndilogError: the process cannot start, or a fault stopped it.
    """
    _check(config)
    raise_limit()
    uvloop.run(_Machine(config, roles, on_ready).run())


def _check(config: Config) -> None:
    """Refuse a configuration with which a machine cannot be part of a cluster."""
    if config.node.metadata.metadata_store != "zookeeper":
        raise ConfigError(
            'Set metadata_store = "zookeeper": the machines of a cluster meet there. On one '
            "machine, use `indilog up --nodes 3`."
        )
    if config.cluster.shared_processes < _MACHINES_MIN:
        raise ConfigError(
            "Set shared_processes in [cluster] to the number of machines that the cluster starts "
            f"with, at least {_MACHINES_MIN}."
        )
    if not config.node.messages.node_host:
        raise ConfigError(
            "Set node_host to the IP address at which the other machines reach this one."
        )
    if len(config.node.zones) > 1:
        raise ConfigError("A machine has one zone; set `zone` to one name, without a comma.")


class _Machine:
    def __init__(
        self, config: Config, roles: Collection[Kind], on_ready: Callable[[str, str], None]
    ) -> None:
        self._config = config
        self._roles = roles
        self._on_ready = on_ready
        self._stop = asyncio.Event()
        self._faults: list[BaseException] = []
        self._is_serving = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        async with contextlib.AsyncExitStack() as stack:
            if (every_s := watchdog_s()) is not None:
                await stack.enter_async_context(running(report_life(every_s)))
            metadata = await stack.enter_async_context(
                opened_metadata(self._config.node, joins=True)
            )
            await self._unless_stopped(self._serve(metadata, stack))
        faulthandler.cancel_dump_traceback_later()
        if self._faults:
            raise self._faults[0]

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`. If the process is stopped before it serves, `work` is cancelled. If it is
        stopped later, `work` ends by itself. The process ends within `stop_timeout_s` after the
        stop, even if something hangs.
        """
        task = asyncio.create_task(work)
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            notify(STOPPING)
            faulthandler.dump_traceback_later(self._config.node.processes.stop_timeout_s, exit=True)
            if not self._is_serving:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        finally:
            stopping.cancel()

    def _fail(self, error: BaseException) -> None:
        self._faults.append(error)
        self._stop.set()

    async def _serve(self, metadata: OpenedMetadata, stack: AsyncExitStack) -> None:
        store = metadata.store
        name, nodes = await registered(metadata, self._config, self._roles)
        structlog.contextvars.bind_contextvars(node=name)
        membership = Membership(store, nodes)
        was_member = await self._was_member(metadata, membership)
        if was_member and membership.left.is_set():
            raise ConfigError(
                f"{name} has left the cluster, so {self._config.node.data_dir} is of no use to "
                "it any more; to join again, start with an empty data directory."
            )
        start = await machine_start(store, self._config)
        await metadata.copy_layout()
        _take_token(self._config)
        node = await stack.enter_async_context(nodes_running(name, nodes, start, store, self._fail))
        board = StatusKeys(store, name)
        await board.look()
        await stack.enter_async_context(running(board.follow()))
        await stack.enter_async_context(
            publish_status(board, nodes, lambda: status_of_process(node.shell))
        )
        await wait_for_metalog(node.shell)  # may take long; the status shows it
        if not was_member:
            await want_joined(store, nodes, self._config.node.zone)
        else:
            await want_zone(store, nodes, self._config.node.zone)
        await metadata.file.compare_and_set(_JOINED_KEY, b"", expected_version=0)
        membership = Membership(store, nodes)
        await membership.look()
        await stack.enter_async_context(running(membership.follow()))
        await stack.enter_async_context(running(remove_gone(store, board)))
        async with AsyncExitStack() as gateways:
            url = ""
            if not membership.leaving.is_set():
                url = await self._gateway(node, board, gateways)
            self._is_serving = True
            notify(READY)
            self._on_ready(name, url)
            await self._first_of(membership.leaving)
        if membership.leaving.is_set() and not self._stop.is_set():
            _log.info("this process leaves the cluster", process=name)
            await install_without(store, nodes)
            await self._first_of(membership.left)
            if membership.left.is_set():
                _log.info("this process has left the cluster", process=name)

    async def _was_member(self, metadata: OpenedMetadata, membership: Membership) -> bool:
        """Return whether the nodes of this process are members of the cluster, or were members at
        an earlier start.
        """
        await membership.look()
        if not membership.left.is_set():
            return True
        return await metadata.file.get(_JOINED_KEY) is not None

    async def _first_of(self, event: asyncio.Event) -> None:
        """Wait until `event` is set, or the process is stopped."""
        waits = [asyncio.create_task(event.wait()), asyncio.create_task(self._stop.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _gateway(self, node: RunningNode, board: StatusKeys, stack: AsyncExitStack) -> str:
        """Run the gateway of the compute node of this process, and return its URL. If the process
        has no compute node, return an empty text.
        """
        config = node.start.config
        port = GatewayPort(config.node.gateway.port, "")
        for engine in node.nodes:
            if (logs := logs_of(node.shell, engine, config)) is not None:
                members = MachineMembers(node.store, config, engine)
                peers, peer_port = peers_on_machines(logs, config, node.addresses)
                serving = calls_served(
                    node.shell,
                    logs,
                    config,
                    port,
                    board=board,
                    members=members,
                    peers=peers,
                    peer_port=peer_port,
                    one_machine=False,
                )
                return await stack.enter_async_context(serving)
        return ""


_JOINED_KEY: Final = "joined"
"""Key in the metadata file of a data directory. It exists if the nodes of the directory have been
members of the cluster.
"""


def _take_token(config: Config) -> None:
    """Copy the token from the directory of the node's keys, unless the data directory has a token.
    So all machines have the same token.
    """
    keys = config.node.messages.node_keys
    there = config.node.data_dir / TOKEN_FILE
    if keys is None or there.exists() or not (keys / TOKEN_FILE).is_file():
        return
    new = Path(f"{there}.new")
    new.unlink(missing_ok=True)
    new.touch(mode=0o600)
    shutil.copyfile(keys / TOKEN_FILE, new)
    os.replace(new, there)  # noqa: PTH105 - atomic
