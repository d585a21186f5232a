"""One suite for every metadata store: sessions, ephemeral keys, and an unreachable store."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from indilog.base.errors import OverloadedError, QuorumUnavailableError
from indilog.config import node_config
from indilog.runtime.metadata.session import HeartbeatSession
from indilog.runtime.metadata.store import (
    Conflict,
    Deleted,
    MetadataStore,
    SessionExpiredError,
    Versioned,
    Written,
)
from tests.support.metadata_places import (
    EMBEDDED,
    SERVED,
    ZOOKEEPER,
    EmbeddedPlace,
    Place,
    ServedPlace,
    place_of,
)
from tests.support.repeated import repeated

CONFIG = node_config(metadata_timeout_s=30.0)
LONG_S = 60.0
"""`ttl_s` of sessions that must survive a test, also on a slow machine."""
SHORT_S = 6.0
"""`ttl_s` of sessions that must expire, or whose time must pass."""
# Both stores have the same sessions (`HeartbeatSession`), whose tests wait for a time to pass.
ON_SERVED = [
    SERVED,
    pytest.param(
        *ZOOKEEPER.values, id=ZOOKEEPER.id, marks=[*ZOOKEEPER.marks, pytest.mark.repeated]
    ),
]
ON_ZOOKEEPER = [repeated(ServedPlace, "served"), ZOOKEEPER]


@pytest_asyncio.fixture(params=[EMBEDDED, SERVED, ZOOKEEPER])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """Yield a new store."""
    async with place_of(request, tmp_path, CONFIG) as opened:
        yield opened


@pytest_asyncio.fixture(params=[SERVED, ZOOKEEPER])
async def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """Yield a new store that other processes can use, and that can be made unreachable."""
    async with place_of(request, tmp_path, CONFIG) as opened:
        yield opened


pytestmark = pytest.mark.asyncio


async def create(session: object, key: str, value: bytes = b"") -> int:
    assert isinstance(session, HeartbeatSession)
    outcome = await session.create(key, value)
    assert isinstance(outcome, Written)
    return outcome.version


async def wait_until_absent(store: MetadataStore, key: str) -> None:
    """Wait until the key does not exist."""
    version = 0
    while True:
        found = await store.get(key)
        if found is None:
            return
        version = found.version
        if await store.watch(key, after=version) is None:
            return


async def test_an_ephemeral_key_vanishes_when_its_session_is_closed(place: Place) -> None:
    store, other = await place.client(), await place.client()
    session = await store.session(LONG_S)
    version = await create(session, "nodes/a", b"here")
    listing = await other.list_keys("nodes/")
    assert listing.items == {"nodes/a": Versioned(b"here", version)}
    watch = asyncio.create_task(other.watch("nodes/a", after=version))
    directory = asyncio.create_task(other.watch_directory("nodes/", after=listing.revision))
    for _ in range(3):
        await asyncio.sleep(0)
        await other.get("nodes/a")
    await session.close()
    await session.close()
    assert await watch is None
    assert (await directory).items == {}


async def test_other_keys_and_other_sessions_stay(place: Place) -> None:
    store = await place.client()
    ending, staying = await store.session(LONG_S), await store.session(LONG_S)
    await create(ending, "nodes/a")
    await create(staying, "nodes/b")
    assert isinstance(await ending.compare_and_set("kept", b"", expected_version=0), Written)
    await ending.close()
    assert set((await store.list_keys("nodes/")).items) == {"nodes/b"}
    assert await store.get("kept") is not None
    staying.check()
    await staying.close()


async def test_an_ephemeral_key_is_created_once(place: Place) -> None:
    store, other = await place.client(), await place.client()
    sessions = [await s.session(LONG_S) for s in (store, other, store, other)]
    outcomes = await asyncio.gather(*(s.create("leader", b"") for s in sessions))
    assert sum(isinstance(outcome, Written) for outcome in outcomes) == 1
    held = await store.get("leader")
    assert held is not None
    assert set(outcomes) == {Written(held.version), Conflict(held.version)}
    for session in sessions:
        await session.close()


async def test_an_ephemeral_key_stays_ephemeral_when_it_is_set(place: Place) -> None:
    store = await place.client()
    session = await store.session(LONG_S)
    version = await create(session, "leader", b"one")
    second = await session.compare_and_set("leader", b"two", expected_version=version)
    assert isinstance(second, Written)
    assert await store.get("leader") == Versioned(b"two", second.version)
    third = await store.compare_and_set("leader", b"three", expected_version=second.version)
    assert isinstance(third, Written)
    await session.close()
    assert await store.get("leader") is None


async def test_an_ephemeral_key_can_be_given_up(place: Place) -> None:
    store = await place.client()
    session = await store.session(LONG_S)
    version = await create(session, "leader")
    assert await session.delete("leader", expected_version=version + 1) == Conflict(version)
    assert await session.delete("leader", expected_version=version) == Deleted()
    assert await create(session, "leader") > version
    await session.close()


async def test_a_new_holder_has_a_greater_version_than_every_earlier_one(place: Place) -> None:
    """The version fences: a late write of an earlier holder is refused."""
    store = await place.client()
    versions = []
    for _ in range(2):
        session = await store.session(LONG_S)
        versions.append(await create(session, "leader", b"x"))
        await session.close()
    last = await store.session(LONG_S)
    versions.append(await create(last, "leader", b"x"))
    assert versions == sorted(set(versions))
    for late in versions[:2]:
        outcome = await store.compare_and_set("leader", b"late", expected_version=late)
        assert outcome == Conflict(versions[2])
    await last.close()


async def test_after_its_end_every_use_of_a_session_raises(place: Place) -> None:
    store = await place.client()
    session = await store.session(LONG_S)
    version = await create(session, "leader")
    await session.close()
    await session.wait_until_expired()
    with pytest.raises(SessionExpiredError, match="is over"):
        session.check()
    for use in (
        session.create("leader", b""),
        session.compare_and_set("leader", b"", expected_version=version),
        session.delete("leader", expected_version=version),
    ):
        with pytest.raises(SessionExpiredError, match="is over"):
            await use
    assert await store.get("leader") is None


@pytest.mark.parametrize("place", [repeated(EmbeddedPlace, "embedded"), *ON_SERVED], indirect=True)
async def test_a_session_whose_heartbeats_are_unanswered_ends_and_its_key_vanishes(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = await place.client(), await place.client()
    session = await store.session(SHORT_S)
    await create(session, "leader")

    async def unanswered() -> bool:
        raise QuorumUnavailableError("cut off")

    monkeypatch.setattr(session, "_heartbeat", unanswered)
    await session.wait_until_expired()
    with pytest.raises(SessionExpiredError):
        session.check()
    await wait_until_absent(other, "leader")


# The served store is an embedded one, whose callers are in other processes.
@pytest.mark.parametrize(
    "place", [repeated(EmbeddedPlace, "embedded"), *ON_ZOOKEEPER], indirect=True
)
async def test_a_session_outlives_its_time_by_heartbeats(place: Place) -> None:
    store = await place.client()
    session = await store.session(SHORT_S)
    version = await create(session, "leader")
    await asyncio.sleep(SHORT_S + 0.5)  # the passing of time is what is tested
    session.check()
    assert await store.get("leader") == Versioned(b"", version)
    await session.close()


@asynccontextmanager
async def holder(place: Place, ttl_s: float) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a process that holds the key `d/leader`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("session_holder.py")),
        place.address,
        "d/leader",
        str(ttl_s),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert (await process.stdout.readline()).startswith(b"holds ")
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ask(process: asyncio.subprocess.Process) -> str:
    """Return the answer of a holder about its session."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"\n")
    await process.stdin.drain()
    return (await process.stdout.readline()).decode().strip()


@pytest.mark.parametrize("elsewhere", ON_ZOOKEEPER, indirect=True)
async def test_the_key_of_a_killed_process_vanishes(elsewhere: Place) -> None:
    store = await elsewhere.client()
    staying = await store.session(LONG_S)
    async with holder(elsewhere, 5.0) as process:
        assert await store.get("d/leader") is not None
        process.kill()
        await wait_until_absent(store, "d/leader")
    await staying.close()


@pytest.mark.parametrize("elsewhere", ON_SERVED, indirect=True)
async def test_a_process_that_was_paused_does_not_believe_that_it_holds_its_key(
    elsewhere: Place,
) -> None:
    store = await elsewhere.client()
    async with holder(elsewhere, 6.0) as process:
        held = await store.get("d/leader")
        assert held is not None
        os.kill(process.pid, signal.SIGSTOP)
        await wait_until_absent(store, "d/leader")
        session = await store.session(LONG_S)
        assert await create(session, "d/leader", b"next") > held.version
        os.kill(process.pid, signal.SIGCONT)
        assert await ask(process) == "knows refused"
        assert await store.get("d/fenced") is None
        assert (await store.get("d/leader") or held).value == b"next"
        await session.close()


async def test_a_session_survives_a_store_that_is_away_for_a_short_time(elsewhere: Place) -> None:
    store = await elsewhere.client()
    session = await store.session(LONG_S)
    version = await create(session, "leader", b"here")
    watch = asyncio.create_task(store.watch("leader", after=version))
    await store.get("leader")
    await elsewhere.away()
    await elsewhere.back()
    assert await store.get("leader") == Versioned(b"here", version)
    session.check()
    second = await session.compare_and_set("leader", b"still", expected_version=version)
    assert isinstance(second, Written)
    assert await watch == Versioned(b"still", second.version)
    await session.close()


@pytest.mark.parametrize("elsewhere", ON_ZOOKEEPER, indirect=True)
async def test_while_the_store_is_away_requests_fail_in_time_and_later_ones_succeed(
    elsewhere: Place,
) -> None:
    hasty = await elsewhere.client(node_config(metadata_timeout_s=4.0))
    outcome = await hasty.compare_and_set("view", b"one", expected_version=0)
    assert isinstance(outcome, Written)
    await elsewhere.away()
    refused = await asyncio.gather(
        hasty.get("view"),
        hasty.list_keys(""),
        hasty.next_sequence("epoch"),
        hasty.compare_and_set("view", b"two", expected_version=outcome.version),
        hasty.session(LONG_S),
        return_exceptions=True,
    )
    assert [type(error) for error in refused] == [QuorumUnavailableError] * 5
    watch = asyncio.create_task(hasty.watch("back", after=0))
    await elsewhere.back()
    store = await elsewhere.client()
    assert await store.get("view") == Versioned(b"one", outcome.version)
    written = await store.compare_and_set("back", b"", expected_version=0)
    assert isinstance(written, Written)
    assert await watch == Versioned(b"", written.version)


@pytest.mark.repeated("tests/unit/runtime/metadata/test_session.py")
@pytest.mark.parametrize("elsewhere", ON_ZOOKEEPER, indirect=True)
async def test_a_session_ends_for_its_owner_while_the_store_is_away(elsewhere: Place) -> None:
    store = await elsewhere.client(node_config(metadata_timeout_s=6.0))
    session = await store.session(SHORT_S)
    await create(session, "leader")
    await elsewhere.away()
    await session.wait_until_expired()
    with pytest.raises(SessionExpiredError):
        session.check()
    await elsewhere.back()
    await wait_until_absent(await elsewhere.client(), "leader")


async def test_the_number_of_sessions_is_bounded(tmp_path: Path) -> None:
    async with ServedPlace(tmp_path, node_config(metadata_sessions_max=2)) as place:
        store = await place.client()
        sessions = [await store.session(LONG_S) for _ in range(2)]
        with pytest.raises(OverloadedError, match="2 sessions"):
            await store.session(LONG_S)
        await sessions[0].close()
        sessions.append(await store.session(LONG_S))
        for session in sessions:
            await session.close()
