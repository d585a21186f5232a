"""A process's cache of object values and of decisions about transactions. With the cache, an
operation on a hot object costs one read.

The cache is derived from the log and never becomes stale. A view names the record up to which it
was replayed, and decisions do not change. The numbers of cached objects, bytes and decisions are
bounded. Views of the least recently used objects, and the oldest decisions, are evicted first. All
stores of one platform share a cache (`cache_of`); `ObjectReplay` and `Decisions` fill it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Final
from weakref import WeakKeyDictionary

from bokistore.lines import Lines, PendingAppends
from bokistore.records import ObjectView
from indilog import Log
from indilog.replayed import scope_of
from indilog.sdk import Event, SeqNum

_VIEWS_PER_OBJECT_MAX: Final = 4
"""Largest number of cached views of one object, as of different records. A transaction reads as of
its horizon, when others may already have changed the object.
"""
_OBJECT_SHARE: Final = 4
"""The older views of one object may use a quarter of the cache; the newest one is always kept."""
_VIEW_OVERHEAD_BYTES: Final = 200
_FLOORS_MAX: Final = 65_536
_RELEASES_MAX: Final = 10_000
"""Largest number of released ids of a log that wait for a record. Beyond it the oldest are dropped,
and stay known until `HELD_S_MAX`.
"""
RELEASED_PER_RECORD_MAX: Final = 8


class Releases:
    """Ids that their owners released, until the record of a transaction names them as released."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[str]] = {}

    def add(self, log: str, ids: Iterable[str]) -> None:
        """Note released ids of a log."""
        waiting = self._waiting.setdefault(log, deque(maxlen=_RELEASES_MAX))
        waiting.extend(ids)

    def take(self, log: str, most: int = RELEASED_PER_RECORD_MAX) -> list[str]:
        """Remove and return at most `most` released ids, the oldest first, for the next record."""
        waiting = self._waiting.get(log, deque())
        return list(dict.fromkeys(waiting.popleft() for _ in range(min(most, len(waiting)))))


class WaitingOperations:
    """The pending operations of this process on one object.

    The record of each operation is appended. The operation waits for the value that the object had
    before that record.

    Attributes:
        reading: an event that is set when the read in progress has finished; None: no read is in
            progress.
        seqnums: seqnums of the operations' records.
        views: the object's view before a record, by seqnum, for the records read so far.
    """

    __slots__ = ("reading", "seqnums", "views")

    def __init__(self) -> None:
        self.reading: Event | None = None
        self.seqnums: set[SeqNum] = set()
        self.views: dict[SeqNum, ObjectView] = {}

    def store(self, seqnum: SeqNum, view: ObjectView) -> None:
        """Store the object's view before a record, unless the operation that waits for this view
        was cancelled.
        """
        if seqnum in self.seqnums:
            self.views[seqnum] = view


class ViewCache:
    """Views of objects and decisions about transactions, for all logs of one platform; also the
    lines of transactions in conflict.

    Args:
        objects_max: largest number of objects with views.
        bytes_max: largest total size of views, in bytes.
        decisions_max: largest number of decisions.
    """

    def __init__(
        self,
        *,
        objects_max: int = 50_000,
        bytes_max: int = 32 * 1024 * 1024,
        decisions_max: int = 50_000,
    ) -> None:
        self._objects_max = objects_max
        self._bytes_max = bytes_max
        self._decisions_max = decisions_max
        self._views: OrderedDict[tuple[str, str], list[ObjectView]] = OrderedDict()
        self._decisions: OrderedDict[tuple[str, SeqNum], bool] = OrderedDict()
        self._waiting: dict[tuple[str, str], WaitingOperations] = {}
        self._floors: dict[tuple[str, str], SeqNum] = {}
        self.lines = Lines()
        self.appends = PendingAppends()
        self.releases = Releases()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._views)

    def view(self, log: str, name: str, bound: SeqNum) -> ObjectView | None:
        """Return the latest view of an object at or below `bound`."""
        views = self._views.get((log, name))
        if views is None:
            return None
        self._views.move_to_end((log, name))
        place = bisect_right(views, bound, key=_seqnum)
        return views[place - 1] if place else None

    def keep_view(self, log: str, name: str, view: ObjectView) -> None:
        """Keep a view, and evict the oldest views of the same object beyond a few. Of a large
        object only the newest view is kept.
        """
        views = self._views.setdefault((log, name), [])
        self._views.move_to_end((log, name))
        place = bisect_right(views, view.seqnum, key=_seqnum)
        if place and views[place - 1].seqnum == view.seqnum:
            self.bytes -= _size(views.pop(place - 1))
        insort(views, view, key=_seqnum)
        self.bytes += _size(view)
        share = self._bytes_max // _OBJECT_SHARE
        while len(views) > 1 and (
            len(views) > _VIEWS_PER_OBJECT_MAX or sum(map(_size, views)) > share
        ):
            self.bytes -= _size(views.pop(0))
        while self._views and (
            self.bytes > self._bytes_max or len(self._views) > self._objects_max
        ):
            _, evicted = self._views.popitem(last=False)
            self.bytes -= sum(map(_size, evicted))
        assert self.bytes >= 0, "evicted views were counted"
        assert len(views) <= _VIEWS_PER_OBJECT_MAX, "the oldest view was evicted"
        assert len(self._views) <= self._objects_max, "the least recently used objects were evicted"

    def waiting(self, log: str, name: str) -> WaitingOperations:
        """Return the pending operations on an object; the entry exists while operations wait."""
        return self._waiting.setdefault((log, name), WaitingOperations())

    def remove_waiting(self, log: str, name: str, waiting: WaitingOperations) -> None:
        """Remove an entry without waiting operations."""
        if not waiting.seqnums:
            self._waiting.pop((log, name), None)

    def floor(self, log: str, tag: str) -> SeqNum:
        """Return a known floor of a tag of ids; 0: none is known."""
        return self._floors.get((log, tag), 0)

    def keep_floor(self, log: str, tag: str, floor: SeqNum) -> None:
        """Keep the floor of a tag of ids, so that lookups begin there."""
        if len(self._floors) >= _FLOORS_MAX:
            self._floors.clear()
        self._floors[log, tag] = floor

    def decision(self, log: str, seqnum: SeqNum) -> bool | None:
        """Tell whether the transaction at `seqnum` committed; None: not cached."""
        return self._decisions.get((log, seqnum))

    def keep_decision(self, log: str, seqnum: SeqNum, *, committed: bool) -> None:
        """Keep the decision about the transaction at `seqnum`."""
        self._decisions[log, seqnum] = committed
        if len(self._decisions) > self._decisions_max:
            self._decisions.popitem(last=False)
        assert len(self._decisions) <= self._decisions_max, "the oldest decision was evicted"


def _seqnum(view: ObjectView) -> SeqNum:
    return view.seqnum


def _size(view: ObjectView) -> int:
    return _VIEW_OVERHEAD_BYTES + (len(view.document) if view.document else 0)


_CACHES: Final[WeakKeyDictionary[object, ViewCache]] = WeakKeyDictionary()


def cache_of(log: Log) -> ViewCache:
    """Return the cache that all stores of one platform share in this process (`Log.scope`)."""
    scope = scope_of(log)
    cache = _CACHES.get(scope)
    if cache is None:
        cache = _CACHES[scope] = ViewCache()
    return cache
