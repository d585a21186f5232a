"""The messages about trims that a `StorageNode` sends to index nodes (ARCHITECTURE 13)."""

from __future__ import annotations

from typing import Final

from indilog.base.ids import NodeId
from indilog.kernel.metalog import Trim
from indilog.kernel.view import View
from indilog.roles.role import Effect, Send
from indilog.wire.tag_messages import TagFloors, TagFloorsWanted
from indilog_storage.ordering import Ordering

_FLOORS_PER_PAGE: Final = 4096


def announce_trim(trim: Trim, view: View, ordering: Ordering) -> list[Effect]:
    """Announce an applied trim to all index nodes."""
    floors = TagFloors(
        trim.number, trim.number + 1, trim.floors, position=trim.position + 1,
        epoch=trim.epoch, previous=ordering.trim_epoch(trim.number),
        copy_of=ordering.last,
    )  # fmt: skip
    return [Send(node, floors) for node in view.index_nodes]


def announce_trims(view: View, ordering: Ordering) -> list[Effect]:
    """Announce the number of applied trims to all index nodes, which then confirm or replace their
    own trims.
    """
    message = _no_floors(ordering)
    return [Send(node, message) for node in view.index_nodes]


def floors_page(ordering: Ordering, message: TagFloorsWanted, to: NodeId) -> Send:
    """Return the next page of all floors. If `to` already has all floors, return an answer without
    floors.
    """
    copy_of, trims, epoch = ordering.trim_extent
    if trims and (trims, epoch) == (message.trims, message.epoch):
        return Send(to, _no_floors(ordering))
    tag = min(max(message.after.tag, 0), 2**64 - 1)
    after = message.after._replace(tag=tag)
    page, last = ordering.floors.page(after, _FLOORS_PER_PAGE)
    floors = TagFloors(
        None, trims, page, after, last, ordering.trimmed_at,
        epoch=epoch, copy_of=copy_of,
    )  # fmt: skip
    return Send(to, floors)


def _no_floors(ordering: Ordering) -> TagFloors:
    copy_of, trims, epoch = ordering.trim_extent
    return TagFloors(
        trims, trims, (), position=ordering.trimmed_at, epoch=epoch, previous=epoch, copy_of=copy_of
    )
