"""What a storage node tells index nodes of trims (ARCHITECTURE 13)."""

from __future__ import annotations

from typing import Final

from indilog.floors import Trimmed
from indilog.ids import MetalogPosition, NodeId
from indilog.metalog import Trim
from indilog.roles import Effect, Send
from indilog.tag_messages import TagFloors, TagFloorsWanted
from indilog.view import View

_FLOORS_PER_PAGE: Final = 4096
_SPEAKERS: Final = 2
"""So many nodes say what is of no shard: while one is down, nobody waits for it."""


def speaks_for_empty(node: NodeId, view: View) -> bool:
    """Whether a node tells of positions without records and of trims; what is repeated is harmless.

    Receivers skip index data and trims that they have.
    """
    return node in view.storage_nodes[:_SPEAKERS]


def told_of(trim: Trim, view: View) -> list[Effect]:
    """Send a trim to all index nodes."""
    floors = TagFloors(trim.number, trim.number + 1, trim.floors, position=trim.position + 1)
    return [Send(node, floors) for node in view.index_nodes]


def floors_page(
    floors: Trimmed, trimmed_at: MetalogPosition, message: TagFloorsWanted, to: NodeId
) -> Send:
    """Answer with the next page of all floors; `trimmed_at` is the position after the last trim."""
    after = min(max(message.after, 0), 2**64 - 1)
    page, last = floors.page(after, _FLOORS_PER_PAGE)
    return Send(to, TagFloors(None, floors.trims, page, after, last, trimmed_at))
