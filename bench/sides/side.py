"""The interface of a side in a comparison of logs: append with a tag, read by tag, and both
alternately (WORKLOADS 2).

A side is opened in a client process of its own (`bench.sides.client`). Its callers call in closed
loops as tasks of one uvloop.
"""

from __future__ import annotations

import abc
import asyncio
import random
from collections.abc import Awaitable
from itertools import count, cycle
from typing import Any, ClassVar, Final

RECORD_BYTES: Final = 1024
READ_BACK: Final = 2000
"""Records from which each client process chooses its reads."""
OPERATIONS: Final = ("append", "read_next", "read_prev", "mixed")
_TAGS: Final = 20
_SEED: Final = 1


class Peer(abc.ABC):
    """One side, in one client process; `caller` is the number of the closed-loop caller.

    Each client has tags of its own, so the results of its reads do not depend on other clients.
    """

    lacks: ClassVar[frozenset[str]] = frozenset()
    """Operations that the side lacks."""

    def __init__(self, client: int) -> None:
        chance = random.Random(f"{_SEED}/{client}")
        self.data = chance.randbytes(RECORD_BYTES)
        self.client = client
        self._tags = cycle([f"tag-{client}-{number}" for number in range(_TAGS)])
        self._order = cycle([chance.randrange(READ_BACK) for _ in range(10 * READ_BACK)])
        self._turn = cycle((True, False))
        self._places: list[tuple[str, Any]] = []

    async def prepare(self, callers: int) -> None:
        """Append the records for the reads, with all callers."""
        numbers = count()

        async def caller(number: int) -> None:
            while next(numbers) < READ_BACK:
                tag = next(self._tags)
                self._places.append((tag, await self.put(number, tag)))

        await asyncio.gather(*map(caller, range(callers)))

    def append(self, caller: int) -> Awaitable[Any]:
        """Append a record with one of the tags; on return it is as durable as the side
        guarantees.
        """
        return self.put(caller, next(self._tags))

    async def read_next(self, caller: int) -> object:
        """Read the first record with a tag from a place on."""
        tag, place = self._places[next(self._order)]
        return found(await self.first(caller, tag, place))

    async def read_prev(self, caller: int) -> object:
        """Read the last record with a tag up to a place."""
        tag, place = self._places[next(self._order)]
        return found(await self.last(caller, tag, place))

    async def mixed(self, caller: int) -> object:
        """Append, and at the next call read."""
        return await (self.append if next(self._turn) else self.read_next)(caller)

    @abc.abstractmethod
    def put(self, caller: int, tag: str) -> Awaitable[Any]:
        """Append a record with `tag`; return its place."""

    @abc.abstractmethod
    def first(self, caller: int, tag: str, place: Any) -> Awaitable[Any]:  # noqa: ANN401 - the side's own
        """Return the first record with `tag` from `place` on."""

    @abc.abstractmethod
    def last(self, caller: int, tag: str, place: Any) -> Awaitable[Any]:  # noqa: ANN401 - the side's own
        """Return the last record with `tag` up to `place`."""


def found(answer: object) -> object:
    """Return a non-empty answer; every requested record exists, so an empty one is an error."""
    if not answer:
        raise RuntimeError("a record that was appended was not found")
    return answer
