"""Load on one log: appends, batches, conditional appends, reads, tails and subscriptions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

from indilog.base.errors import IndilogError
from indilog.base.log import After, Entry, Record
from indilog.remote_client import RemoteClient
from tests.nemesis.recording import Recorder
from tests.simulation.history import Operation, Seen, seen

LOG: Final = "load"
PAUSE_S: Final = 0.02
TAGS: Final = ("a", "b", "c")
CHAINS: Final = ("chain-0", "chain-1")
"""Tags that only conditional appends use."""
RECENT: Final = 300
"""Reads begin at most this many seqnums before the end."""
BEYOND: Final = 1 << 40
_PADDING: Final = b" " * 500
_KINDS: Final = {
    "append": 10,
    "append_batch": 2,
    "append_if": 4,
    "read_next": 3,
    "read_prev": 3,
    "read_range": 2,
    "read": 3,
    "tail": 2,
}


class LogSession:
    """A caller whose operations follow one another."""

    def __init__(self, client: RemoteClient, recorder: Recorder, engine: str, seed: int) -> None:
        self._client = client
        self._log = client.log(LOG)
        self._recorder = recorder
        self._engine = engine
        self._number = recorder.session()
        self._rng = random.Random(seed)
        self._values = 0
        self._known: dict[str, int | None] = dict.fromkeys(CHAINS)
        self._end = 0
        self._acts: dict[str, Callable[[], Awaitable[None]]] = {
            "append": self._append,
            "append_batch": self._append_batch,
            "append_if": self._append_if,
            "read_next": self._read_next,
            "read_prev": self._read_prev,
            "read_range": self._read_range,
            "read": self._read,
            "tail": self._tail,
        }

    async def live(self) -> None:
        """Call without end, with short pauses."""
        names, weights = list(_KINDS), list(_KINDS.values())
        while True:
            [name] = self._rng.choices(names, weights)
            await self._acts[name]()
            await asyncio.sleep(self._rng.uniform(0, 2 * PAUSE_S))

    async def _call(
        self,
        kind: str,
        act: Callable[[], Awaitable[Any]],
        **fields: Any,  # noqa: ANN401
    ) -> Operation:
        operation = Operation(0, self._number, self._engine, kind, LOG, **fields)
        await self._recorder.call(self._client, operation, act)
        if operation.outcome == "ok" and isinstance(operation.value, tuple | list):
            last = operation.value[-1] if operation.value else 0
            self._end = max(self._end, last.seqnum if isinstance(last, Seen) else last)
        if operation.outcome == "failed":
            await asyncio.sleep(0.1)
        return operation

    def _entry(self, *tags: str) -> tuple[bytes, tuple[str, ...]]:
        self._values += 1
        data = b"%d-%d" % (self._number, self._values) + _PADDING
        return data, tags or (self._rng.choice(TAGS),)

    # --- appends

    async def _append(self) -> None:
        data, tags = entry = self._entry()

        async def act() -> list[int]:
            return [await self._log.append(data, tags=tags)]

        await self._call("append", act, entries=(entry,))

    async def _append_batch(self) -> None:
        entries = tuple(self._entry() for _ in range(self._rng.randint(2, 8)))
        await self._call(
            "append_batch",
            lambda: self._log.append_batch([Entry(*entry) for entry in entries]),
            entries=entries,
        )

    async def _append_if(self) -> None:
        """Append if the chain's last record is the one that is known; else learn the last one."""
        chain = self._rng.choice(CHAINS)
        known, entry = self._known[chain], self._entry(chain)
        operation = await self._call(
            "append_if",
            lambda: self._log.append_batch([Entry(*entry)], after=After(chain, known)),
            entries=(entry,),
            tag=chain,
            after=known,
        )
        if operation.outcome == "ok":
            self._known[chain] = operation.value[-1]
        elif operation.note.startswith("ConditionFailedError"):
            self._known[chain] = operation.value

    # --- reads

    def _place(self) -> tuple[str | None, int, bool]:
        """Return a tag, a bound near the end, and whether the read is fresh."""
        tag = self._rng.choice((None, *TAGS, *CHAINS))
        return tag, max(0, self._end - self._rng.randrange(RECENT)), self._rng.random() < 0.3

    async def _read_next(self) -> None:
        tag, bound, fresh = self._place()

        async def act() -> tuple[Seen, ...]:
            return _one(await self._log.read_next(tag, bound, fresh=fresh))

        await self._call("read_next", act, tag=tag, bound=bound, fresh=fresh)

    async def _read_prev(self) -> None:
        tag, bound, fresh = self._place()
        bound = self._rng.choice((bound, BEYOND))

        async def act() -> tuple[Seen, ...]:
            return _one(await self._log.read_prev(tag, bound, fresh=fresh))

        await self._call("read_prev", act, tag=tag, bound=bound, fresh=fresh)

    async def _read_range(self) -> None:
        tag, bound, fresh = self._place()
        limit = self._rng.randint(1, 50)

        async def act() -> tuple[Seen, ...]:
            return tuple(
                map(seen, await self._log.read_range(tag, bound, limit=limit, fresh=fresh))
            )

        await self._call("read_range", act, tag=tag, bound=bound, limit=limit, fresh=fresh)

    async def _read(self) -> None:
        """Read a record anywhere, also an old one."""
        bound = self._rng.randrange(self._end + 1)

        async def act() -> tuple[Seen, ...]:
            return _one(await self._log.read(bound))

        await self._call("read", act, bound=bound)

    async def _tail(self) -> None:
        await self._call("tail", self._log.tail)


def _one(record: Record | None) -> tuple[Seen, ...]:
    return () if record is None else (seen(record),)


async def follow(client: RemoteClient, shown: list[Seen], recorder: Recorder) -> None:
    """Add all records that a subscription shows to `shown`; continue after errors."""
    log = client.log(LOG)
    while True:
        bound = shown[-1].seqnum + 1 if shown else 0
        try:
            async for record in log.subscribe(bound=bound):
                shown.append(seen(record))  # noqa: PERF401 - readers see it grow
        except IndilogError:
            recorder.count("subscribe", "failed")
            await asyncio.sleep(0.2)


async def scanned(client: RemoteClient) -> tuple[list[Seen], list[float]]:
    """Return all records of the log, and when each was ordered."""
    log, found, stamps = client.log(LOG), list[Seen](), list[float]()
    while page := await log.read_range(
        bound=found[-1].seqnum + 1 if found else 0, limit=1000, fresh=True
    ):
        found += map(seen, page)
        stamps += [record.ordered_at for record in page]
    return found, stamps
