"""Messages about the metalog, as a primary would send them, and the first events of a role."""

from __future__ import annotations

from collections.abc import Sequence

from indilog.base.ids import Epoch, MetalogPosition, NodeId
from indilog.kernel.metalog import Entry
from indilog.roles.role import Event, Started, TermBegun
from indilog.wire.messages import MetalogEntries, MetalogWanted


def started(epoch: int, primary: NodeId = NodeId("sequencer-0")) -> list[Event]:  # noqa: B008
    """Return the events of a start in incarnation `epoch`, which also numbers the newest term."""
    return [Started(Epoch(epoch)), TermBegun(Epoch(epoch), primary)]


def entries_message(
    entries: Sequence[Entry],
    *,
    previous: int | None = None,
    committed: MetalogPosition | None = None,
    request: int = 0,
) -> MetalogEntries:
    """Return a message with consecutive entries, at least one. By default all have the same
    incarnation and are committed.
    """
    start = entries[0].position
    if previous is None:
        previous = entries[0].epoch if start else 0
    end = start + len(entries)
    committed = end if committed is None else committed
    return MetalogEntries(start, Epoch(previous), tuple(entries), committed, request)


def nothing_more(wanted: MetalogWanted) -> MetalogEntries:
    """Return the answer that the requester has all entries."""
    return MetalogEntries(wanted.start, wanted.last, (), wanted.start, wanted.request)
