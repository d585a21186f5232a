"""What a process remembers of objects and decisions: a hot object costs one look at the log.

Everything in it follows from the log and never becomes wrong: a view says as of which record it
is, and what the log's order decided stays decided. It is bounded in views, bytes and decisions: the
views of the objects least recently used go first, and the decisions first made.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from typing import Final
from weakref import WeakKeyDictionary

from bokistore.records import ObjectView
from indilog import Log
from indilog.sdk import Event, SeqNum

_VIEWS_PER_OBJECT_MAX: Final = 4
"""Views of one object at different records: a transaction reads at its horizon, while others
already moved the object on."""
_VIEW_OVERHEAD_BYTES: Final = 200


class Line:
    """Operations of this process on one object that are appended, and wait to know what was before
    them.

    Attributes:
        looking: while one looks for all; set when it is done, and all go on together.
        waiting: their records.
        noted: what was before a record, as far as that is found out.
    """

    __slots__ = ("looking", "noted", "waiting")

    def __init__(self) -> None:
        self.looking: Event | None = None
        self.waiting: set[SeqNum] = set()
        self.noted: dict[SeqNum, ObjectView] = {}

    def note(self, seqnum: SeqNum, view: ObjectView) -> None:
        """Note what was before a record, unless who waited for it was cancelled meanwhile."""
        if seqnum in self.waiting:
            self.noted[seqnum] = view


class ViewCache:
    """Views of objects and decisions about transactions, of all logs of one platform.

    Args:
        objects_max: objects of which views are kept.
        bytes_max: size of all views.
        decisions_max: transactions whose outcome is kept.
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
        self._lines: dict[tuple[str, str], Line] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._views)

    def view(self, log: str, name: str, bound: SeqNum) -> ObjectView | None:
        """Return the latest view of an object that is not beyond `bound` (inclusive)."""
        views = self._views.get((log, name))
        if views is None:
            return None
        self._views.move_to_end((log, name))
        place = bisect_right(views, bound, key=_seqnum)
        return views[place - 1] if place else None

    def keep_view(self, log: str, name: str, view: ObjectView) -> None:
        """Keep a view, and forget the oldest of the same object beyond a few."""
        views = self._views.setdefault((log, name), [])
        self._views.move_to_end((log, name))
        place = bisect_right(views, view.seqnum, key=_seqnum)
        if place and views[place - 1].seqnum == view.seqnum:
            self.bytes -= _size(views.pop(place - 1))
        insort(views, view, key=_seqnum)
        self.bytes += _size(view)
        if len(views) > _VIEWS_PER_OBJECT_MAX:
            self.bytes -= _size(views.pop(0))
        while self._views and (
            self.bytes > self._bytes_max or len(self._views) > self._objects_max
        ):
            _, evicted = self._views.popitem(last=False)
            self.bytes -= sum(map(_size, evicted))

    def line(self, log: str, name: str) -> Line:
        """Return the line of an object's operations; there is one as long as a caller waits."""
        return self._lines.setdefault((log, name), Line())

    def leave(self, log: str, name: str, line: Line) -> None:
        """Forget a line in which no caller waits any more."""
        if not line.waiting:
            self._lines.pop((log, name), None)

    def decision(self, log: str, seqnum: SeqNum) -> bool | None:
        """Tell whether the transaction at `seqnum` committed; None: not known here."""
        return self._decisions.get((log, seqnum))

    def keep_decision(self, log: str, seqnum: SeqNum, *, committed: bool) -> None:
        """Keep what the log's order decided about the transaction at `seqnum`."""
        self._decisions[log, seqnum] = committed
        if len(self._decisions) > self._decisions_max:
            self._decisions.popitem(last=False)


def _seqnum(view: ObjectView) -> SeqNum:
    return view.seqnum


def _size(view: ObjectView) -> int:
    return _VIEW_OVERHEAD_BYTES + (len(view.document) if view.document else 0)


_CACHES: Final[WeakKeyDictionary[object, ViewCache]] = WeakKeyDictionary()


def cache_of(log: Log) -> ViewCache:
    """Return the cache that all stores of one platform share in this process (`Log.scope`)."""
    cache = _CACHES.get(log.scope)
    if cache is None:
        cache = _CACHES[log.scope] = ViewCache()
    return cache
