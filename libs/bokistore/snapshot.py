"""Reads objects as of one seqnum: snapshots and time travel (thesis 2.3.3: state is replayed, so
any earlier state can be read). `Store` returns a `Snapshot`, which calls `ObjectReplay`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TypeVar, overload

from bokistore.objects import Obj
from bokistore.records import UNWRITTEN, tag_of
from bokistore.replay import ObjectReplay
from bokistore.tags import index_of
from indilog import Log
from indilog.sdk import SeqNum

_PAGE: Final = 256
_TypedT = TypeVar("_TypedT")


class Snapshot:
    """All objects as of the records below `end`. Reads of a snapshot never conflict, and append no
    writes.

    Args:
        log: the store's log.
        replay: the store's replay.
        end: the first seqnum that is not visible; None: the tail at the first read.
        may_append: whether to append a checkpoint after a long replay.
    """

    def __init__(
        self, log: Log, replay: ObjectReplay, end: SeqNum | None = None, *, may_append: bool = False
    ) -> None:
        self._log = log
        self._replay = replay
        self._asked = end
        self._may_append = may_append
        self._ends: list[SeqNum] = []
        """Concurrent first reads each ask for the tail; the first answer is used for all."""

    @property
    def end(self) -> SeqNum | None:
        """The first seqnum that is not visible; None if it was not given and nothing was read
        yet.
        """
        return self._ends[0] if self._ends else None

    async def __aenter__(self) -> Self:
        await self._place()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Do nothing: a snapshot holds no resources."""

    async def _place(self) -> SeqNum:
        """Return `end`; the first call decides it.

        Raises:
            ValueError: `at` is above the tail.
        """
        if not self._ends:
            tail = await self._log.tail()
            end = tail if self._asked is None else self._asked
            if end > tail:
                raise ValueError(
                    f"The log ends at seqnum {tail - 1}; there is no state as of {end - 1} yet."
                )
            self._ends.append(end)
        return self._ends[0]

    @overload
    async def get(self, name: str) -> Obj: ...
    @overload
    async def get(self, name: str, type: type[_TypedT]) -> _TypedT | None: ...
    async def get(
        self,
        name: str,
        type: type[_TypedT] | None = None,  # noqa: A002
    ) -> Obj | _TypedT | None:
        """Return an object, or its value as type `type`; see `Store.get`."""
        tag_of(name)
        bound = await self._place() - 1
        view = await self._replay.view(name, bound, may_append=self._may_append)
        return Obj(name, view).convert(type)

    async def multi_get(self, names: Iterable[str]) -> dict[str, Obj]:
        """Return several objects by name, all as of `end`."""
        return {name: await self.get(name) for name in dict.fromkeys(names)}

    async def find(self, tag: str) -> dict[str, Obj]:
        """Return the objects that have a tag, by name, in the order in which they first got it."""
        index = await self.get(index_of(tag))
        found = await self.multi_get(index)
        return {name: obj for name, obj in found.items() if tag in obj.tags}


@dataclass(frozen=True)
class Version:
    """One committed write of an object.

    Attributes:
        seqnum: seqnum of its record; `store.at(seqnum)` reads all objects as of that record.
        time: when its record was ordered (`Record.ordered_at`), seconds since 1970.
        object: the object after the write.
    """

    seqnum: SeqNum
    time: float
    object: Obj


async def versions(
    log: Log, replay: ObjectReplay, name: str, start: SeqNum
) -> AsyncIterator[Version]:
    """Yield the committed writes of an object from seqnum `start` on, oldest first."""
    tag = tag_of(name)
    view = await replay.view(name, start - 1) if start else UNWRITTEN
    while page := await log.read_range(tag, start, limit=_PAGE):
        for record in page:
            view = await replay.advance(name, view, record)
            if view.version == record.seqnum:
                yield Version(record.seqnum, record.ordered_at, Obj(name, view))
        start = page[-1].seqnum + 1
