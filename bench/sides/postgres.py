"""PostgreSQL: a table with an ascending number, a tag and the data, and an index over tag and
number. INSERT ... RETURNING appends; SELECT ... ORDER BY ... LIMIT 1 reads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, Final

import asyncpg

from bench.sides.side import Peer

CONNECTIONS_MAX: Final = 64
"""Connections of a client process; further callers wait. With more, PostgreSQL gets slower."""
_TABLE: Final = """
SELECT pg_advisory_xact_lock(1);
CREATE TABLE IF NOT EXISTS records (
    seqnum bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tag text NOT NULL, data bytea NOT NULL
);
CREATE INDEX IF NOT EXISTS by_tag ON records (tag, seqnum);
"""
_APPEND: Final = "INSERT INTO records (tag, data) VALUES ($1, $2) RETURNING seqnum"
_NEXT: Final = """
SELECT seqnum, data FROM records WHERE tag = $1 AND seqnum >= $2 ORDER BY seqnum LIMIT 1
"""
_PREV: Final = """
SELECT seqnum, data FROM records WHERE tag = $1 AND seqnum <= $2 ORDER BY seqnum DESC LIMIT 1
"""


class Postgres(Peer):
    """asyncpg: a pool of connections; statements are prepared once per connection."""

    def __init__(self, client: int, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        super().__init__(client)
        self._pool = pool

    def put(self, caller: int, tag: str) -> Awaitable[Any]:
        """INSERT, a transaction of its own."""
        return self._pool.fetchval(_APPEND, tag, self.data)

    def first(self, caller: int, tag: str, place: Any) -> Awaitable[Any]:  # noqa: ANN401
        """SELECT ascending."""
        return self._pool.fetchrow(_NEXT, tag, place)

    def last(self, caller: int, tag: str, place: Any) -> Awaitable[Any]:  # noqa: ANN401
        """SELECT descending."""
        return self._pool.fetchrow(_PREV, tag, place)


@asynccontextmanager
async def postgres(address: dict[str, Any], client: int, callers: int) -> AsyncIterator[Peer]:
    """Connect over the Unix socket; create the table, if it does not exist."""
    size = min(callers, CONNECTIONS_MAX)
    async with asyncpg.create_pool(
        host=address["host"], port=address["port"], user="bench", database="postgres",
        min_size=size, max_size=size,
    ) as pool:  # fmt: skip
        await pool.execute(_TABLE)
        yield Postgres(client, pool)
