"""A log that is opened by its first call, such as one in an object store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from indilog.base.ids import MAX_SEQNUM, SeqNum, UserTag
from indilog.base.log import After, Entry, Log, Record
from indilog.base.retention import Retention


class LateLog(Log):
    """Passes each call to the log that `open_log` returns; raises what opening raises.

    Args:
        name: name of the log.
        scope: see `Log.scope`.
        open_log: returns the log; opens it if it is not open. It is awaited by every call.
    """

    def __init__(self, name: str, scope: object, open_log: Callable[[], Awaitable[Log]]) -> None:
        self.name = name
        self._scope = scope
        self._open_log = open_log

    @property
    def scope(self) -> object:
        """See `Log.scope`."""
        return self._scope

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        """See `Log.append`."""
        return await (await self._open_log()).append(data, tags=tags)

    async def append_batch(
        self, entries: Sequence[Entry], *, after: After | None = None
    ) -> list[SeqNum]:
        """See `Log.append_batch`."""
        return await (await self._open_log()).append_batch(entries, after=after)

    async def read(self, seqnum: SeqNum, *, fresh: bool = False) -> Record | None:
        """See `Log.read`."""
        return await (await self._open_log()).read(seqnum, fresh=fresh)

    async def read_next(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        wait: float | None = None,
        fresh: bool = False,
    ) -> Record | None:
        """See `Log.read_next`."""
        return await (await self._open_log()).read_next(tag, bound, wait=wait, fresh=fresh)

    async def read_prev(
        self, tag: UserTag | None = None, bound: SeqNum = MAX_SEQNUM, *, fresh: bool = False
    ) -> Record | None:
        """See `Log.read_prev`."""
        return await (await self._open_log()).read_prev(tag, bound, fresh=fresh)

    async def read_range(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        limit: int = 1000,
        wait: float | None = None,
        fresh: bool = False,
    ) -> list[Record]:
        """See `Log.read_range`."""
        log = await self._open_log()
        return await log.read_range(tag, bound, limit=limit, wait=wait, fresh=fresh)

    async def tail(self) -> SeqNum:
        """See `Log.tail`."""
        return await (await self._open_log()).tail()

    async def now(self) -> float:
        """See `Log.now`."""
        return await (await self._open_log()).now()

    async def find_time(self, time: float) -> SeqNum:
        """See `Log.find_time`."""
        return await (await self._open_log()).find_time(time)

    async def trim(self, until: SeqNum, *, tag: UserTag | None = None) -> None:
        """See `Log.trim`."""
        await (await self._open_log()).trim(until, tag=tag)

    async def set_retention(
        self, *, age_s: float | None = None, size_bytes: int | None = None
    ) -> None:
        """See `Log.set_retention`."""
        await (await self._open_log()).set_retention(age_s=age_s, size_bytes=size_bytes)

    async def retention(self) -> Retention:
        """See `Log.retention`."""
        return await (await self._open_log()).retention()

    async def set_aux(self, seqnum: SeqNum, aux: bytes) -> None:
        """See `Log.set_aux`."""
        await (await self._open_log()).set_aux(seqnum, aux)
