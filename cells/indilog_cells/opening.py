"""Opens logs over cells with the settings of a platform: cells in an object store, or on storage
nodes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, Protocol

import structlog

from indilog.base.errors import IndilogError, NotReadyError
from indilog.base.ids import NodeId
from indilog.base.log_kinds import ORDER_FIRST, LogKind
from indilog.config import Config
from indilog.kernel.cell_layout import CellLayout
from indilog.wire.cell_messages import CellAnswer, CellQuestion
from indilog_cells.cells import CellsError
from indilog_cells.chain_cells import Asks, ChainCells
from indilog_cells.chain_upkeep import ChainUpkeep
from indilog_cells.core import CoreLimits
from indilog_cells.driver import CellDriver, driver_running
from indilog_cells.log import CellLogs
from indilog_cells.object_cells import ObjectCells
from indilog_cells.object_store import object_store_at

_OBJECTS: Final = "objects"
"""Directory of logs, in the platform's directory."""
_CHECK_S: Final = 1.0
"""Seconds between two checks of a layout."""
_REOPEN_S: Final = 0.5
_PART_BITS: Final = 61

_log = structlog.get_logger(__name__)


class Created(Protocol):
    """A created log, as the catalog has it."""

    @property
    def log(self) -> str:
        """Its name."""

    @property
    def kind(self) -> LogKind:
        """Its kind."""

    @property
    def place(self) -> str:
        """Its object store; empty: the platform's own directory."""

    @property
    def folder(self) -> str:
        """A name that no other log has."""


class CellPlatform(Protocol):
    """What a compute node knows of storage nodes and layouts."""

    async def ask_cells(self, node: NodeId, question: CellQuestion, /) -> CellAnswer:
        """Ask a storage node; raises `IndilogError` if there is no answer."""

    def storage_nodes(self) -> Sequence[NodeId]:
        """Return the storage nodes of the newest view."""

    def serves(self) -> bool:
        """Whether this compute node keeps layouts up to date."""

    def layout(self, name: str) -> CellLayout:
        """Return the newest known layout of a log."""

    async def renew_layouts(self) -> None:
        """Read the recorded layouts; raises `IndilogError`."""

    async def change_layout(self, name: str, before: CellLayout, after: CellLayout) -> bool:
        """Record a layout after `before`; return whether it is recorded. Raises `IndilogError`."""


class PlatformCells:
    """The `CellNodes` and `Layouts` of one log of a platform."""

    def __init__(self, platform: CellPlatform, name: str) -> None:
        self._platform, self._name = platform, name

    async def ask_all(self, asks: Asks) -> Sequence[CellAnswer | None]:
        """See `CellNodes.ask_all`."""
        if len(asks) == 1:
            return [await self._ask(*asks[0])]
        return await asyncio.gather(*(self._ask(node, question) for node, question in asks))

    async def _ask(self, node: NodeId, question: CellQuestion) -> CellAnswer | None:
        try:
            return await self._platform.ask_cells(node, question)
        except IndilogError:
            return None

    @property
    def layout(self) -> CellLayout:
        """See `Layouts.layout`."""
        return self._platform.layout(self._name)

    async def renew(self) -> None:
        """See `Layouts.renew`."""
        try:
            await self._platform.renew_layouts()
        except IndilogError as error:
            raise CellsError(f"the layout of the log cannot be read: {error}") from error

    async def change(self, before: CellLayout, after: CellLayout) -> bool:
        """See `Layouts.change`."""
        try:
            return await self._platform.change_layout(self._name, before, after)
        except IndilogError as error:
            raise CellsError(f"the layout of the log cannot be changed: {error}") from error


def created_logs(
    created: Created,
    platform: CellPlatform,
    config: Config,
    platform_dir: Path | None,
    *,
    is_shared: bool,
) -> AbstractAsyncContextManager[CellLogs]:
    """Open a created log of another kind than `shared` while the block runs.

    Args:
        created: the log.
        platform: the storage nodes and layouts.
        config: settings.
        platform_dir: a directory that all compute nodes reach; None: there is none.
        is_shared: other compute nodes may append to the log at the same time.

    Raises:
        NotReadyError, DataDirectoryError, DataLossError: see `object_logs`, `order_first_logs`.
    """
    if created.kind == ORDER_FIRST:
        return order_first_logs(platform, created.log, created.folder, config, is_shared=is_shared)
    place = platform_place(created.place, platform_dir)
    return object_logs(place, created.folder, config, is_shared=is_shared)


@asynccontextmanager
async def order_first_logs(
    platform: CellPlatform, name: str, folder: str, config: Config, *, is_shared: bool
) -> AsyncIterator[CellLogs]:
    """Open the logs in the cells of the log `name` while the block runs.

    Args:
        platform: the storage nodes and layouts.
        name: the created log.
        folder: its folder in the catalog.
        config: settings of the platform.
        is_shared: other compute nodes may append to the log at the same time.

    Raises:
        NotReadyError: the storage nodes do not answer, and could not be replaced in time.
        DataLossError: a cell is damaged.
    """
    settings = config.node.cells
    nodes = PlatformCells(platform, name)
    part_bytes = config.cluster.batch_bytes_max
    cells = ChainCells(
        nodes,
        nodes,
        part_bytes=part_bytes,
        new_part=lambda: secrets.randbits(_PART_BITS) + 1,
    )
    limits = CoreLimits(
        cells_in_flight=settings.cells_in_flight,
        cell_bytes=part_bytes,
        items_waiting=settings.cell_appends_max,
        fill_after_us=int(settings.cell_fill_after_s * 1e6),
    )
    loop = asyncio.get_running_loop()
    timeout_s = config.node.appends.append_timeout_s
    until = loop.time() + timeout_s + settings.cell_replace_after_s
    upkeep = _upkeep_of(cells, nodes, platform, folder, config)
    checking = loop.create_task(_check(upkeep, platform))
    try:
        async with AsyncExitStack() as stack:
            driver: CellDriver | None = None
            while driver is None:
                driving = driver_running(
                    cells,
                    limits=limits,
                    cache_bytes_max=settings.cell_cache_bytes_max,
                    timeout_s=timeout_s,
                    is_shared=is_shared,
                )
                try:
                    driver = await stack.enter_async_context(driving)
                except NotReadyError:  # a lost node may be replaced meanwhile
                    if loop.time() >= until:
                        raise
                    await asyncio.sleep(_REOPEN_S)
            yield CellLogs(driver, config.cluster)
    finally:
        checking.cancel()
        await asyncio.gather(checking, return_exceptions=True)


def _upkeep_of(
    cells: ChainCells, nodes: PlatformCells, platform: CellPlatform, folder: str, config: Config
) -> ChainUpkeep:
    return ChainUpkeep(
        cells,
        nodes,
        nodes,
        lambda works: asyncio.gather(*works),
        folder=folder,
        copies=config.cluster.replicas,
        available=platform.storage_nodes,
        replace_after_s=config.node.cells.cell_replace_after_s,
        clock=asyncio.get_running_loop().time,
    )


async def _check(upkeep: ChainUpkeep, platform: CellPlatform) -> None:
    """Keep the layout up to date. The same failure is logged once."""
    failure = ""
    while True:
        await asyncio.sleep(_CHECK_S)
        if not platform.serves():
            continue
        try:
            await upkeep.check()
            failure = ""
        except CellsError as error:
            if str(error) != failure:
                failure = str(error)
                _log.warning("the layout of a log cannot be changed for now", reason=failure)
        except Exception:  # noqa: BLE001 - outermost: the next check may succeed
            _log.exception("the check of a layout failed")


def platform_place(place: str, platform_dir: Path | None) -> str:
    """Return the place of a log.

    Args:
        place: the recorded place; empty: a directory of the platform.
        platform_dir: directory of the platform; None: it is on another machine.

    Raises:
        NotReadyError: the log is on another machine.
    """
    if place:
        return place
    if platform_dir is None:
        raise NotReadyError("The log is in a directory of another machine.")
    return str((platform_dir / _OBJECTS).absolute())


@asynccontextmanager
async def object_logs(
    place: str, folder: str, config: Config, *, is_shared: bool
) -> AsyncIterator[CellLogs]:
    """Open the logs in `folder` of the store at `place` while the block runs.

    Args:
        place: see `indilog_cells.object_store`.
        folder: folder of the logspace.
        config: settings of the platform.
        is_shared: other processes may use the folder at the same time.

    Raises:
        NotReadyError: the store does not answer.
        DataDirectoryError: the logs are of another version.
        DataLossError: a cell is damaged.
    """
    settings = config.node.object_logs
    store = object_store_at(place, timeout_s=settings.object_timeout_s)
    try:
        cells = await ObjectCells.opened(store, folder)
    except CellsError as error:
        raise NotReadyError(f"The log's store cannot be read: {error}.") from error
    limits = CoreLimits(
        cells_in_flight=settings.object_cells_in_flight,
        cell_bytes=config.cluster.batch_bytes_max,
        items_waiting=settings.object_appends_max,
        fill_after_us=int(settings.object_fill_after_s * 1e6),
    )
    async with driver_running(
        cells,
        limits=limits,
        cache_bytes_max=settings.object_cache_bytes_max,
        timeout_s=config.node.appends.append_timeout_s,
        is_shared=is_shared,
    ) as driver:
        yield CellLogs(driver, config.cluster)
