"""Who waits for a record with a tag to appear (ARCHITECTURE 9.5): woken by index data, never by
polling.

A watch says that there may be something, not what: its owner reads again. It fires once.
"""

from __future__ import annotations

from array import array

from indilog.errors import OverloadedError
from indilog.ids import SeqNum, TagHash
from indilog.index_feed import ReadyBlock


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
            OverloadedError: too many wait already.
        """
        if self._count >= self._watches_max:
            raise OverloadedError(f"{self._count:,} reads wait for a record; try again later.")
        self._by_tag.setdefault(tag, {})[waiter] = bound
        self._count += 1

    def remove(self, tag: TagHash, waiter: object) -> None:
        """Forget a watch; harmless if it has fired."""
        watches = self._by_tag.get(tag, {})
        if waiter in watches:
            del watches[waiter]
            self._count -= 1
            if not watches:
                del self._by_tag[tag]

    def fired_by(self, block: ReadyBlock) -> list[object]:
        """Take out the waiters for whom index data may have brought something."""
        fired: list[object] = []
        for part in block.parts:
            # Of lost records, any tag may be meant.
            tags = list(self._by_tag) if part.lost else set(array("Q", part.tags))
            for tag in self._by_tag.keys() & tags:
                mine = [w for w, bound in self._by_tag[tag].items() if bound < block.tail]
                for waiter in mine:
                    self.remove(tag, waiter)
                fired += mine
        return fired

    def clear(self) -> list[object]:
        """Take out all waiters."""
        waiters = [waiter for watches in self._by_tag.values() for waiter in watches]
        self._by_tag.clear()
        self._count = 0
        return waiters


class ReadyWaiters:
    """Who waits until the node has joined; at most `waiters_max`."""

    def __init__(self, waiters_max: int) -> None:
        self._waiters_max = waiters_max
        self._waiters: list[object] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def add(self, waiter: object) -> None:
        """Let one more wait.

        Raises:
            OverloadedError: too many do already.
        """
        if len(self._waiters) >= self._waiters_max:
            raise OverloadedError(f"{len(self._waiters):,} callers wait for this node.")
        self._waiters.append(waiter)

    def take(self) -> list[object]:
        """Take out all of them."""
        waiters, self._waiters = self._waiters, []
        return waiters
