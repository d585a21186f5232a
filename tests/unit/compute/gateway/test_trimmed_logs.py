"""What is left of a trimmed log is read where no bound was named; a bound below it is an error."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI, Request
from starlette.types import Receive, Scope, Send

from indilog.base.errors import TrimmedError
from indilog.config import ClusterConfig, Config
from indilog.link.byte_budget import ByteBudget
from indilog.testing import MemoryLogs
from indilog_compute.gateway.clients import SHARE
from indilog_compute.gateway.page_text import RecordLimits
from indilog_compute.gateway.problems import problem_of
from indilog_compute.gateway.records import LogRoutes, records_router

pytestmark = pytest.mark.asyncio
BEGAN = 1_700_000_000.0
FLOOR = 3


@pytest_asyncio.fixture
async def logs() -> MemoryLogs:
    """Six records, one a second, of which three are trimmed."""
    now = BEGAN
    made = MemoryLogs(ClusterConfig(), clock=lambda: now)
    log = made.log("tl")
    for _ in range(6):
        await log.append(b"x", tags=["a"])
        now += 1
    await log.trim(FLOOR)
    return made


LIMITS = RecordLimits.of(Config())


@pytest_asyncio.fixture
async def client(logs: MemoryLogs) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    app.include_router(records_router(logs, LIMITS, body_bytes_max=1000))

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, SHARE: ByteBudget(10**6).share()}, receive, send)

    transport = httpx.ASGITransport(counted)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as made:
        yield made


@pytest.mark.parametrize(
    ("query", "seqnums", "next_bound"),
    [
        ("", [3, 4, 5], 6),
        ("since=0", [3, 4, 5], 6),
        ("since=0&bound=0", None, None),
        (f"since={BEGAN + 1}&bound=0", [3, 4, 5], 6),
        (f"since={BEGAN + 4}", [4, 5], 6),
        ("tag=a&limit=1", [3], 4),
        ("direction=prev", [5, 4, 3], 2),
        ("bound=2", None, None),
        ("bound=2&direction=prev", None, None),
        ("bound=3", [3, 4, 5], 6),
    ],
)
async def test_a_read_without_a_bound_begins_at_the_trim_floor(
    client: httpx.AsyncClient, query: str, seqnums: list[int] | None, next_bound: int | None
) -> None:
    if seqnums is None:
        with pytest.raises(TrimmedError):
            await client.get(f"/logs/tl/records?{query}")
        return
    page = (await client.get(f"/logs/tl/records?{query}")).json()
    assert ([r["seqnum"] for r in page["records"]], page["next_bound"]) == (seqnums, next_bound)


@pytest.mark.parametrize("direction", ["next", "prev"])
async def test_a_log_trimmed_to_its_tail_is_read_as_empty(
    logs: MemoryLogs, client: httpx.AsyncClient, direction: str
) -> None:
    await logs.log("tl").trim(6)
    page = (await client.get(f"/logs/tl/records?direction={direction}")).json()
    next_bound = 6 if direction == "next" else None
    assert page == {"records": [], "next_bound": next_bound, "more": False}


async def streamed(logs: MemoryLogs, count: int, **query: int | datetime) -> list[int]:
    routes = LogRoutes(logs, LIMITS, body_bytes_max=1000)
    request = Request({"type": "http", SHARE: ByteBudget(10**6).share()})
    events = (await routes.stream("tl", request, **query)).body_iterator  # type: ignore[arg-type]
    found: list[int] = []
    async for event in events:
        assert isinstance(event, bytes)
        found.append(json.loads(event.partition(b"data: ")[2])["seqnum"])
        if len(found) == count:
            break
    return found


async def test_a_stream_without_a_bound_begins_at_the_trim_floor(logs: MemoryLogs) -> None:
    assert await streamed(logs, 3) == [3, 4, 5]
    assert await streamed(logs, 3, since=datetime.fromtimestamp(0, UTC)) == [3, 4, 5]
    assert await streamed(logs, 1, since=datetime.fromtimestamp(BEGAN + 4, UTC)) == [4]
    for query in ({"bound": 2}, {"last_event_id": 1}):
        with pytest.raises(TrimmedError):
            await streamed(logs, 1, **query)


async def test_a_trimmed_error_names_the_first_readable_seqnum() -> None:
    assert problem_of(TrimmedError(541)).next_seqnum == 541
