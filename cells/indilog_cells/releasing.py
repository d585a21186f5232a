"""Deletes what is kept of a log over cells that is freed (decision 0095).

No compute node of the platform uses such a log. A process that left the platform may still try to,
and must not take a deleted cell for an unwritten one: it would acknowledge appends that are not in
the log, or miss records. So storage nodes say that its cells are absent, and object stores keep
empty objects under the names of cells.

`indilog_compute.log_kinds` calls this. A call may be repeated, also after a crash.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from indilog.base.errors import NotReadyError
from indilog.base.log_kinds import ORDER_FIRST, OWNED
from indilog.config import Config
from indilog.wire.cell_messages import CellOutcome, CellsDrop
from indilog_cells.cells import CellsError
from indilog_cells.object_cells import ObjectCells
from indilog_cells.object_store import object_store_at
from indilog_cells.opening import CellPlatform, Created, PlatformCells, platform_place

_DELETED: Final = (CellOutcome.DONE, CellOutcome.ABSENT)


async def release_log(
    created: Created,
    platform: CellPlatform,
    config: Config,
    platform_dir: Path | None,
    *,
    is_shared: bool,
) -> None:
    """Delete the cells or objects of a freed log.

    Args:
        created: the log.
        platform: the storage nodes.
        config: settings.
        platform_dir: a directory that all compute nodes reach; None: there is none.
        is_shared: whether other compute nodes may have used the log.

    Raises:
        NotReadyError: a storage node or the object store does not answer; some cells may be left.
        DataDirectoryError, DataLossError: see `ObjectCells.opened`.
    """
    if created.kind in (ORDER_FIRST, OWNED):
        await _drop_spaces(created.folder, platform)
        return
    place = platform_place(created.place, platform_dir)
    store = object_store_at(place, timeout_s=config.node.object_logs.object_timeout_s)
    try:
        if is_shared:
            await (await ObjectCells.opened(store, created.folder)).release()
        else:
            await store.delete_folder(created.folder)
    except CellsError as error:
        raise NotReadyError(f"The objects of {created.folder} stay for now: {error}.") from error


async def _drop_spaces(folder: str, platform: CellPlatform) -> None:
    """Delete the spaces on all storage nodes, also those of earlier layouts."""
    nodes = platform.storage_nodes()
    cells = PlatformCells(platform, folder)
    answers = await cells.ask_all([(node, CellsDrop(0, folder)) for node in nodes])
    for node, answer in zip(nodes, answers, strict=True):
        if answer is None or answer.outcome not in _DELETED:
            raise NotReadyError(f"{node} keeps cells of {folder} for now.")
