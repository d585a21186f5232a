"""Readers that wait for a record with a tag (ARCHITECTURE 9.5), and callers that wait until the
node has joined.

A watch fires once, when index data shows that a record with its tag may exist. Then the reader
reads again. `LocalLog` adds watches; `Engine` answers the waiters.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Final

from indilog.base.errors import OverloadedError
from indilog.base.ids import SeqNum, TagHash
from indilog.roles.index_feed import ReadyBlock

_TAG_BYTES: Final = 8
_TAGS_PER_SEARCH: Final = 16
"""In the time in which one tag is decoded and looked up, the bytes of this many tags can be
searched for one given tag.
"""


class Watches:
    """The waiting readers of one engine, by tag; at most `watches_max`."""

    def __init__(self, watches_max: int) -> None:
        self._watches_max = watches_max
        self._by_tag: dict[TagHash, dict[object, SeqNum]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, tag: TagHash, bound: SeqNum, waiter: object) -> None:
        """Let `waiter` wait for a record with `tag` at `bound` or beyond.

        Raises:
            OverloadedError: too many readers wait already.
        """
        if self._count >= self._watches_max:
            raise OverloadedError(f"{self._count:,} reads wait for a record; try again later.")
        assert waiter not in self._by_tag.get(tag, ()), "a reader waits once"
        self._by_tag.setdefault(tag, {})[waiter] = bound
        self._count += 1

    def remove(self, tag: TagHash, waiter: object) -> None:
        """Remove a watch; the call has no effect if the watch has fired."""
        watches = self._by_tag.get(tag, {})
        if waiter in watches:
            del watches[waiter]
            self._count -= 1
            assert self._count >= 0
            if not watches:
                del self._by_tag[tag]

    def fired_by(self, block: ReadyBlock) -> list[object]:
        """Remove and return the waiters whose records may be in the index data of `block`."""
        fired: list[object] = []
        for part in block.parts:
            # A lost record may have had any tag.
            for tag in list(self._by_tag) if part.lost else self._watched_in(part.tags):
                mine = [w for w, bound in self._by_tag[tag].items() if bound < block.tail]
                for waiter in mine:
                    self.remove(tag, waiter)
                fired += mine
        return fired

    def _watched_in(self, tags: bytes) -> Iterable[TagHash]:
        """Return the watched tags among `tags`, u64 each."""
        watched = self._by_tag
        if len(watched) * _TAGS_PER_SEARCH > len(tags) // _TAG_BYTES:
            return watched.keys() & array("Q", tags)
        return [tag for tag in watched if _is_in(tag, tags)]

    def clear(self) -> list[object]:
        """Remove and return all waiters."""
        waiters = [waiter for watches in self._by_tag.values() for waiter in watches]
        self._by_tag.clear()
        self._count = 0
        return waiters

    def check_invariants(self) -> None:
        """Assert the limit, and that the count is right."""
        assert self._count == sum(map(len, self._by_tag.values())), "watches are counted"
        assert self._count <= self._watches_max, "more watches than allowed"
        assert all(self._by_tag.values()), "a tag without watches is dropped"


def _is_in(tag: TagHash, tags: bytes) -> bool:
    """Whether `tag` is one of `tags`, u64 each. Equal bytes that span two tags do not count."""
    packed = tag.to_bytes(_TAG_BYTES, sys.byteorder)
    place = tags.find(packed)
    while place > 0 and place % _TAG_BYTES:
        place = tags.find(packed, place + 1)
    return place >= 0


class ReadyWaiters:
    """Callers that wait until the node has joined; at most `waiters_max`."""

    def __init__(self, waiters_max: int) -> None:
        self._waiters_max = waiters_max
        self._waiters: list[object] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def add(self, waiter: object) -> None:
        """Add a waiter.

        Raises:
            OverloadedError: too many callers wait already.
        """
        if len(self._waiters) >= self._waiters_max:
            raise OverloadedError(f"{len(self._waiters):,} callers wait for this node.")
        self._waiters.append(waiter)

    def take(self) -> list[object]:
        """Remove and return all waiters."""
        waiters, self._waiters = self._waiters, []
        return waiters
