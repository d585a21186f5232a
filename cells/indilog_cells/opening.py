"""Opens the logs of a folder of an object store with the settings of a platform."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from indilog.base.errors import NotReadyError
from indilog.config import Config
from indilog_cells.cells import CellsError
from indilog_cells.core import CoreLimits
from indilog_cells.driver import driver_running
from indilog_cells.log import CellLogs
from indilog_cells.object_cells import ObjectCells
from indilog_cells.object_store import object_store_at

_OBJECTS: Final = "objects"
"""Directory of logs, in the platform's directory."""


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
