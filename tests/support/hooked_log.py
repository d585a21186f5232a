"""Logs in memory with hooks around the calls that append and find records: for tests in which such
a call waits, fails or is counted.

A test's own log overrides the hooks that it needs, and repeats no signature of `Log`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from indilog.base.ids import MAX_SEQNUM, SeqNum, UserTag
from indilog.base.log import After, Entry, Record, Session
from indilog.testing import MemoryLog, MemoryLogs


@dataclass(frozen=True, kw_only=True)
class Read:
    """The arguments of a read.

    Attributes:
        is_page: whether the read is a `read_range`.
    """

    tag: UserTag | None
    bound: SeqNum
    wait: float | None = None
    fresh: bool = False
    is_page: bool = False


class Hooks:
    """Hooks that do nothing until overridden; an exception of a hook reaches the caller."""

    async def before_append(self, entries: Sequence[Entry]) -> None:
        """Run before the entries of one call are in the log."""

    async def after_append(self, entries: Sequence[Entry]) -> None:
        """Run after the entries are in the log and before the caller gets the result."""

    async def before_read(self, read: Read) -> None:
        """Run before the lookup."""

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        """Return the records that the caller gets, given those that were found."""
        return records


class HookedLog(Hooks, MemoryLog):
    """A log with the given `hooks`, or with its own."""

    def __init__(
        self,
        name: str,
        *,
        logs: MemoryLogs | None = None,
        session: Session | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        super().__init__(name, logs=logs, session=session)
        self._hooks = self if hooks is None else hooks

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        entry = Entry(data, tags if isinstance(tags, str) else tuple(tags))
        await self._hooks.before_append([entry])
        seqnum = await super().append(data, tags=entry.tags)
        await self._hooks.after_append([entry])
        return seqnum

    async def append_batch(
        self, entries: Sequence[Entry], *, after: After | None = None
    ) -> list[SeqNum]:
        await self._hooks.before_append(entries)
        seqnums = await super().append_batch(entries, after=after)
        await self._hooks.after_append(entries)
        return seqnums

    async def read_next(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        wait: float | None = None,
        fresh: bool = False,
    ) -> Record | None:
        read = Read(tag=tag, bound=bound, wait=wait, fresh=fresh)
        await self._hooks.before_read(read)
        record = await super().read_next(tag, bound, wait=wait, fresh=fresh)
        return await self._one(read, record)

    async def read_prev(
        self, tag: UserTag | None = None, bound: SeqNum = MAX_SEQNUM, *, fresh: bool = False
    ) -> Record | None:
        read = Read(tag=tag, bound=bound, fresh=fresh)
        await self._hooks.before_read(read)
        return await self._one(read, await super().read_prev(tag, bound, fresh=fresh))

    async def _one(self, read: Read, record: Record | None) -> Record | None:
        found = await self._hooks.after_read(read, [] if record is None else [record])
        return found[0] if found else None

    async def read_range(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        limit: int = 1000,
        wait: float | None = None,
        fresh: bool = False,
    ) -> list[Record]:
        read = Read(tag=tag, bound=bound, wait=wait, fresh=fresh, is_page=True)
        await self._hooks.before_read(read)
        page = await super().read_range(tag, bound, limit=limit, wait=wait, fresh=fresh)
        return await self._hooks.after_read(read, page)


class HookedLogs(Hooks, MemoryLogs):
    """Logs that share their hooks."""

    def log(self, name: str, session: Session | None = None) -> MemoryLog:
        return HookedLog(name, logs=self, session=session, hooks=self)
