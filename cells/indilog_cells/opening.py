"""Opens logs whose records are in cells, with the settings of a platform.

A cell has a position, and takes one content (`indilog_cells.cells`). Cells are objects of a store,
or are on storage nodes, in a space of each node for each log.

`indilog_compute.log_kinds` calls this for each created log that is not `shared`. A log on storage
nodes also gets the periodic check of its layout, which runs while the log is open.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import structlog

from indilog.base.errors import IndilogError, MalformedFrameError, NotReadyError
from indilog.base.ids import NodeId
from indilog.base.log_kinds import ORDER_FIRST, OWNED, LogKind
from indilog.config import Config
from indilog.kernel.cell_layout import CellLayout, full_nodes
from indilog.roles.node_requests import NodeRequests
from indilog.wire.cell_messages import CellAnswer, CellQuestion
from indilog_cells.cells import CellsError
from indilog_cells.chain_cells import ChainCells
from indilog_cells.chain_upkeep import ChainUpkeep
from indilog_cells.core import CORE_LIMITS, CoreLimits
from indilog_cells.driver import CellDriver, Growth, driver_running
from indilog_cells.layout_changes import Asks, LayoutChanges
from indilog_cells.log import CellLogs
from indilog_cells.object_cells import ObjectCells
from indilog_cells.object_store import object_store_at
from indilog_cells.outcomes import AppendedContent, decode_appended
from indilog_cells.owned_cells import OwnedCells
from indilog_cells.owned_upkeep import OwnedUpkeep

_OBJECTS: Final = "objects"
"""Directory of logs, in the platform's directory."""
_CHECK_S: Final = 1.0
"""Seconds between two checks of a layout."""
_REOPEN_S: Final = 0.5
_GROWTH_PAUSE_S: Final = 1.0
"""Seconds until a reader asks again, if no other node can tell it of growth now."""
_PART_BITS: Final = 61
_TOKEN_AFTER_US: Final = 1 << 60
"""Without a token, a process must not write to an `owned` log. It waits without a limit, because
`OwnedCells.acquire` returns or raises.
"""
_OWNER_BYTES: Final = 8

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
        """A name that no other log has; part of the names of its objects or spaces."""

    @property
    def stripes(self) -> int:
        """Over how many chains or folders its cells are spread; 0: it has no stripes."""


class ComputeNodes(Protocol):
    """The compute nodes of a platform."""

    @property
    def node(self) -> NodeId:
        """This compute node."""

    def compute_nodes(self) -> Sequence[NodeId]:
        """Return the compute nodes of the newest view."""


class CellPlatform(ComputeNodes, Protocol):
    """What a compute node knows of other nodes and of layouts."""

    @property
    def requests(self) -> NodeRequests:
        """The requests to other nodes."""

    def storage_nodes(self) -> Sequence[NodeId]:
        """Return the storage nodes of the newest view."""

    def serves(self) -> bool:
        """Whether this compute node is the one that checks the layouts of all logs."""

    def layout(self, folder: str) -> CellLayout:
        """Return the newest known layout of the logspace in `folder`."""

    async def renew_layouts(self) -> None:
        """Read the recorded layouts; raises `IndilogError`."""

    async def change_layout(self, folder: str, before: CellLayout, after: CellLayout) -> bool:
        """Record the layout that follows `before`; return whether it is recorded. Raises
        `IndilogError`.
        """


class PlatformCells:
    """The `CellNodes` and `Layouts` of one logspace of a platform.

    Args:
        platform: the platform.
        folder: the folder of the logspace; no other logspace has it.
    """

    def __init__(self, platform: CellPlatform, folder: str) -> None:
        self._platform, self._folder = platform, folder
        self._telling: dict[asyncio.Task[None], None] = {}
        """As an ordered set, so a simulation replays a run."""

    async def ask_all(self, asks: Asks) -> Sequence[CellAnswer | None]:
        """See `CellNodes.ask_all`."""
        if len(asks) == 1:
            return [await self._ask(*asks[0])]
        return await asyncio.gather(*(self._ask(node, question) for node, question in asks))

    async def ask_until(self, asks: Asks, heard: Callable[[int, CellAnswer | None], bool]) -> None:
        """See `OwnedNodes.ask_until`."""
        enough = asyncio.get_running_loop().create_future()
        left = len(asks)

        def took(at: int, answer: CellAnswer | None) -> None:
            nonlocal left
            left -= 1
            if (heard(at, answer) or not left) and not enough.done():
                enough.set_result(None)

        if asks:
            self.tell(asks, took)
            await enough

    def tell(self, asks: Asks, heard: Callable[[int, CellAnswer | None], object]) -> None:
        """See `OwnedNodes.tell`."""
        loop = asyncio.get_running_loop()
        for at, ask in enumerate(asks):
            task = loop.create_task(self._tell(at, ask, heard))
            self._telling[task] = None
            task.add_done_callback(self._telling.pop)

    async def _tell(
        self,
        at: int,
        ask: tuple[NodeId, CellQuestion],
        heard: Callable[[int, CellAnswer | None], object],
    ) -> None:
        heard(at, await self._ask(*ask))

    async def run_all(self, works: Sequence[Coroutine[Any, Any, object]]) -> None:
        """See `OwnedNodes.run_all`."""
        await asyncio.gather(*works)

    async def pause(self, seconds: float) -> None:
        """See `OwnedNodes.pause`."""
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        """Stop waiting for outstanding answers."""
        for task in self._telling:
            task.cancel()
        await asyncio.gather(*self._telling, return_exceptions=True)

    async def send_to_owner(self, owner: str, content: bytes) -> AppendedContent:
        """See `SendToOwner`."""
        node = node_of(owner)
        try:
            answer = await self._platform.requests.append_through(
                node, self._folder, owner, content
            )
            return decode_appended(answer)
        except (IndilogError, MalformedFrameError) as error:
            raise CellsError(f"{node} did not append: {error}") from error

    async def _ask(self, node: NodeId, question: CellQuestion) -> CellAnswer | None:
        try:
            return await self._platform.requests.ask_cells(node, question)
        except IndilogError:
            return None

    @property
    def layout(self) -> CellLayout:
        """See `Layouts.layout`."""
        return self._platform.layout(self._folder)

    async def full_disks(self) -> Sequence[NodeId]:
        """Return the storage nodes whose full disks stop the log from taking records."""
        full = self._platform.requests.full_disks()
        return full_nodes(self.layout, full) if full else ()

    async def renew(self) -> None:
        """See `Layouts.renew`."""
        try:
            await self._platform.renew_layouts()
        except IndilogError as error:
            raise CellsError(f"the layout of the log cannot be read: {error}") from error

    async def change(self, before: CellLayout, after: CellLayout) -> bool:
        """See `Layouts.change`."""
        try:
            return await self._platform.change_layout(self._folder, before, after)
        except IndilogError as error:
            raise CellsError(f"the layout of the log cannot be changed: {error}") from error


class PlatformGrowth:
    """The growth of a created log, which the compute nodes tell one another: a `Growth`."""

    def __init__(self, created: Created, platform: CellPlatform) -> None:
        self._created, self._platform = created, platform

    def _appending(self) -> Sequence[NodeId]:
        """Return the other compute nodes that may append to the log."""
        nodes = self._platform.compute_nodes()
        if self._created.kind == OWNED:
            owner = node_of(self._platform.layout(self._created.folder).owner)
            nodes = [node for node in nodes if node == owner]
        return [node for node in nodes if node != self._platform.node]

    async def elsewhere(self, position: int) -> bool:
        """See `Growth.elsewhere`."""
        others, folder = self._appending(), self._created.folder
        try:
            if others:
                return await self._platform.requests.growth_of(others, folder, position)
        except IndilogError:
            pass
        await asyncio.sleep(_GROWTH_PAUSE_S)
        return False

    def here(self, position: int) -> None:
        """See `Growth.here`."""
        self._platform.requests.grew(self._created.folder, position)


def created_logs(
    created: Created,
    platform: CellPlatform,
    config: Config,
    platform_dir: Path | None,
    *,
    is_new: bool,
    is_shared: bool,
) -> AbstractAsyncContextManager[CellLogs]:
    """Open a created log of another kind than `shared` while the block runs.

    Args:
        created: the log.
        platform: the storage nodes and layouts.
        config: settings.
        platform_dir: a directory that all compute nodes reach; None: there is none.
        is_new: whether a log in an object store is created if it does not exist; otherwise that is
            an error. The spaces of a log on storage nodes exist already.
        is_shared: whether other compute nodes may append to the log at the same time.

    Raises:
        NotReadyError, DataDirectoryError, DataLossError: see `object_logs`, `node_logs`.
    """
    growth = PlatformGrowth(created, platform) if is_shared else None
    if created.kind in (ORDER_FIRST, OWNED):
        return node_logs(created, platform, config, growth=growth)
    place = platform_place(created.place, platform_dir)
    new_stripes = created.stripes if is_new else None
    return object_logs(place, created.folder, config, new_stripes=new_stripes, growth=growth)


@asynccontextmanager
async def node_logs(
    created: Created, platform: CellPlatform, config: Config, *, growth: Growth | None
) -> AsyncIterator[CellLogs]:
    """Open a created log whose cells are on storage nodes, and check its layout, while the block
    runs.

    Args:
        created: the log, of kind `order-first` or `owned`.
        platform: the storage nodes and layouts.
        config: settings of the platform.
        growth: see `CellDriver`; None: no other compute node appends to the log.

    Raises:
        NotReadyError: storage nodes do not answer, and were not replaced in time.
        DataLossError: a cell is damaged.
    """
    settings = config.node.cells
    nodes = PlatformCells(platform, created.folder)

    opened = _owned(created, nodes, platform, config) if created.kind == OWNED else None
    cells, check = opened or _chained(created, nodes, platform, config)
    limits = CoreLimits(
        cells_in_flight=settings.cells_in_flight,
        cell_bytes=config.cluster.batch_bytes_max,
        items_waiting=settings.cell_appends_max,
        fill_after_us=int(settings.cell_fill_after_s * 1e6),
        token_after_us=_TOKEN_AFTER_US if created.kind == OWNED else CORE_LIMITS.token_after_us,
    )
    loop = asyncio.get_running_loop()
    timeout_s = config.node.appends.append_timeout_s
    until = loop.time() + timeout_s + settings.cell_replace_after_s
    checking = loop.create_task(_repeat(check))
    try:
        async with AsyncExitStack() as stack:
            driver: CellDriver | None = None
            while driver is None:
                driving = driver_running(
                    cells,
                    limits=limits,
                    cache_bytes_max=settings.cell_cache_bytes_max,
                    timeout_s=timeout_s,
                    is_shared=growth is not None,
                    send_to_owner=nodes.send_to_owner,
                    growth=growth,
                    full_disks=nodes.full_disks,
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
        await nodes.close()


def _chained(
    created: Created, nodes: PlatformCells, platform: CellPlatform, config: Config
) -> tuple[ChainCells, Callable[[], Awaitable[None]]]:
    """Return the cells of a log of kind `order-first`, and the check of its layout."""
    cells = ChainCells(nodes, nodes, part_bytes=config.cluster.batch_bytes_max, new_part=new_part)
    upkeep = ChainUpkeep(
        cells,
        nodes,
        nodes,
        _changes(created, nodes, platform, config),
        nodes.run_all,
        replace_after_s=config.node.cells.cell_replace_after_s,
        clock=asyncio.get_running_loop().time,
    )

    async def check() -> None:
        if platform.serves():
            await upkeep.check()

    return cells, check


def _owned(
    created: Created, nodes: PlatformCells, platform: CellPlatform, config: Config
) -> tuple[ChainCells, Callable[[], Awaitable[None]]]:
    """Return the cells of a log of kind `owned`, and the check of its layout. The owner's process
    checks the layout too, and completes the cells that a replica lacks.
    """
    changes = _changes(created, nodes, platform, config)
    cells = OwnedCells(
        nodes,
        nodes,
        changes,
        new_owner=lambda: f"{platform.node}/{secrets.token_hex(_OWNER_BYTES)}",
        may_claim=lambda owner: has_ended(owner, platform),
        part_bytes=config.cluster.batch_bytes_max,
        new_part=new_part,
    )
    upkeep = OwnedUpkeep(
        cells,
        nodes,
        nodes,
        changes,
        nodes.run_all,
        replace_after_s=config.node.cells.cell_replace_after_s,
        clock=asyncio.get_running_loop().time,
    )

    async def check() -> None:
        if cells.is_owner or platform.serves():
            await upkeep.check()
        await cells.repair()

    return cells, check


def node_of(owner: str) -> NodeId:
    """Return the compute node of an owner. The name of an owner stands for one tenure: it is the
    name of the node, `/`, and a random part.
    """
    node, _, _ = owner.rpartition("/")
    return NodeId(node)


def has_ended(owner: str, nodes: ComputeNodes) -> bool:
    """Whether no process appends as this owner any more. So it is if the owner was an earlier
    process of this compute node, if its node is not in the view, or if the log had no owner.

    The present process of this node must not ask about itself.
    """
    node = node_of(owner)
    return node == nodes.node or node not in nodes.compute_nodes()


def _changes(
    created: Created, nodes: PlatformCells, platform: CellPlatform, config: Config
) -> LayoutChanges:
    return LayoutChanges(
        nodes,
        nodes,
        folder=created.folder,
        copies=config.cluster.replicas,
        available=platform.storage_nodes,
    )


def new_part() -> int:
    """Return a new number for a part of a note. A note that is too long for one cell has several
    parts (`ChainCells`).
    """
    return secrets.randbits(_PART_BITS) + 1


async def _repeat(check: Callable[[], Awaitable[None]]) -> None:
    """Check a layout periodically. A failure that repeats is logged once."""
    failure = ""
    while True:
        await asyncio.sleep(_CHECK_S)
        try:
            await check()
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
        place: the recorded place; empty: `objects` in the directory of the platform.
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
    place: str, folder: str, config: Config, *, new_stripes: int | None, growth: Growth | None
) -> AsyncIterator[CellLogs]:
    """Open the logs in `folder` of the store at `place` while the block runs.

    Args:
        place: see `indilog_cells.object_store`.
        folder: the folder of the logspace.
        config: settings of the platform.
        new_stripes: if the logs do not exist, they are created with so many stripes; None: that is
            an error.
        growth: see `CellDriver`; None: no other process uses the folder.

    Raises:
        NotReadyError: the store does not answer.
        DataDirectoryError: another version wrote the logs.
        DataLossError: a cell is damaged, or the store does not have the logs.
    """
    settings = config.node.object_logs
    store = object_store_at(
        place,
        timeout_s=settings.object_timeout_s,
        reserve_bytes=config.node.journal.disk_reserve_bytes,
    )
    try:
        if new_stripes is None:
            cells = await ObjectCells.opened(store, folder)
        else:
            cells = await ObjectCells.created(store, folder, stripes=new_stripes)
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
        is_shared=growth is not None,
        growth=growth,
        full_disks=store.full_disks,
    ) as driver:
        yield CellLogs(driver, config.cluster)
