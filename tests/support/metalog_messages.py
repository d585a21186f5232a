"""Messages about the metalog, as a primary would send them, and the first events of a role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from indilog.base.ids import Epoch, MetalogPosition, NodeId, ShardId
from indilog.kernel.metalog import Base, Entry, GrowingBase
from indilog.roles.role import Event, Started, TermBegun
from indilog.wire.messages import MetalogEntries, MetalogWanted
from indilog_ordering.stored_metalog import StoredMetalog


def started(epoch: int, primary: NodeId = NodeId("sequencer-0")) -> list[Event]:  # noqa: B008
    """Return the events of a start in incarnation `epoch`, which also numbers the newest term."""
    return [Started(Epoch(epoch)), TermBegun(Epoch(epoch), primary)]


def with_writers(writers: Mapping[ShardId, Epoch]) -> bytes:
    """Return a sequencer's checkpoint without entries, in which shards have writers."""
    metalog = StoredMetalog()
    metalog.base = Base(writers=dict(writers))
    metalog.committed = GrowingBase(metalog.base)
    return metalog.checkpoint()()


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
