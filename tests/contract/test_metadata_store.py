"""One suite for every metadata store: the file in this process, and the same file served over a
socket.

Some tests open the store twice: `again()` closes it and opens it on the same file, as after a
restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from indilog.base.errors import OverloadedError, TooLargeError
from indilog.config import node_config
from indilog.runtime.cluster.metadata import (
    Conflict,
    EmbeddedMetadataStore,
    MetadataStore,
    Versioned,
    Written,
)
from indilog.runtime.cluster.metadata_service import MetadataClient, MetadataServer

CONFIG = node_config(metadata_keys_max=8, metadata_value_bytes_max=1000, metadata_timeout_s=5.0)
Open = Callable[[], Awaitable[MetadataStore]]


@asynccontextmanager
async def embedded(directory: Path) -> AsyncIterator[MetadataStore]:
    with EmbeddedMetadataStore(directory / "metadata", CONFIG) as store:
        yield store


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[MetadataStore]:
    address = f"ipc://{directory}/m"
    with EmbeddedMetadataStore(directory / "metadata", CONFIG) as store:
        server = MetadataServer(store, address, CONFIG)
        async with MetadataClient(address, CONFIG) as client:
            yield client
        await server.close()


@pytest_asyncio.fixture(params=[embedded, served], ids=lambda kind: kind.__name__)
async def again(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    """Yield a function that opens the store again on the same file."""
    stack = AsyncExitStack()

    async def opened() -> MetadataStore:
        await stack.aclose()
        store: MetadataStore = await stack.enter_async_context(request.param(tmp_path))
        return store

    yield opened
    await stack.aclose()


pytestmark = pytest.mark.asyncio


async def test_a_key_that_was_never_set_has_no_value(again: Open) -> None:
    assert await (await again()).get("view") is None


async def test_a_set_value_is_read_back_with_its_version(again: Open) -> None:
    store = await again()
    assert await store.compare_and_set("view", b"one", expected_version=0) == Written(1)
    assert await store.get("view") == Versioned(b"one", 1)
    assert await store.compare_and_set("view", b"two", expected_version=1) == Written(2)
    assert await store.get("view") == Versioned(b"two", 2)


async def test_an_empty_value_is_a_value(again: Open) -> None:
    store = await again()
    await store.compare_and_set("view", b"", expected_version=0)
    assert await store.get("view") == Versioned(b"", 1)


@pytest.mark.parametrize("expected", [0, 1, 3])
async def test_a_stale_write_changes_nothing_and_returns_the_version(
    again: Open, expected: int
) -> None:
    store = await again()
    await store.compare_and_set("view", b"one", expected_version=0)
    await store.compare_and_set("view", b"two", expected_version=1)
    assert await store.compare_and_set("view", b"x", expected_version=expected) == Conflict(2)
    assert await store.get("view") == Versioned(b"two", 2)


async def test_a_write_that_expects_a_value_conflicts_with_an_absent_one(again: Open) -> None:
    store = await again()
    assert await store.compare_and_set("view", b"x", expected_version=1) == Conflict(0)
    assert await store.get("view") is None


async def test_exactly_one_of_several_concurrent_writers_wins_each_version(again: Open) -> None:
    store = await again()
    outcomes = await asyncio.gather(
        *(store.compare_and_set("view", bytes([i]), expected_version=0) for i in range(20))
    )
    winners = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Written)]
    assert len(winners) == 1
    assert await store.get("view") == Versioned(bytes(winners), 1)


async def test_each_sequence_counts_from_one(again: Open) -> None:
    store = await again()
    assert [await store.next_sequence("a") for _ in range(3)] == [1, 2, 3]
    assert await store.next_sequence("b") == 1


async def test_a_number_of_a_sequence_is_issued_once(again: Open) -> None:
    store = await again()
    numbers = await asyncio.gather(*(store.next_sequence("a") for _ in range(20)))
    assert len(set(numbers)) == 20


async def test_values_and_sequences_survive_a_restart(again: Open) -> None:
    store = await again()
    await store.compare_and_set("view", b"one", expected_version=0)
    number = await store.next_sequence("epoch")
    store = await again()
    assert await store.get("view") == Versioned(b"one", 1)
    assert await store.next_sequence("epoch") > number
    assert await store.compare_and_set("view", b"two", expected_version=1) == Written(2)


async def test_a_watch_returns_at_once_for_an_already_newer_version(again: Open) -> None:
    store = await again()
    await store.compare_and_set("view", b"one", expected_version=0)
    assert await store.watch("view", after=0) == Versioned(b"one", 1)


async def test_a_watch_waits_for_the_change(again: Open) -> None:
    store = await again()
    await store.compare_and_set("view", b"one", expected_version=0)
    watch = asyncio.create_task(store.watch("view", after=1))
    await store.compare_and_set("other", b"x", expected_version=0)
    await store.get("view")
    assert not watch.done()
    await store.compare_and_set("view", b"two", expected_version=1)
    assert await watch == Versioned(b"two", 2)


async def test_a_watch_waits_for_a_key_that_does_not_exist_yet(again: Open) -> None:
    store = await again()
    watches = [asyncio.create_task(store.watch("view", after=0)) for _ in range(5)]
    await store.get("view")
    await store.compare_and_set("view", b"one", expected_version=0)
    assert await asyncio.gather(*watches) == [Versioned(b"one", 1)] * 5


async def test_a_watch_can_be_cancelled(again: Open) -> None:
    store = await again()
    watch = asyncio.create_task(store.watch("view", after=0))
    await store.get("view")
    watch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watch
    await store.compare_and_set("view", b"one", expected_version=0)
    assert await store.get("view") == Versioned(b"one", 1)


async def test_a_value_at_its_limit_is_accepted_and_a_larger_one_refused(again: Open) -> None:
    store = await again()
    await store.compare_and_set("view", b"x" * 1000, expected_version=0)
    with pytest.raises(TooLargeError, match="1,000"):
        await store.compare_and_set("view", b"x" * 1001, expected_version=1)
    assert await store.get("view") == Versioned(b"x" * 1000, 1)


async def test_a_key_at_its_limit_is_accepted_and_a_longer_one_refused(again: Open) -> None:
    store = await again()
    await store.compare_and_set("k" * 256, b"", expected_version=0)
    for refused in (
        store.compare_and_set("k" * 257, b"", expected_version=0),
        store.next_sequence("k" * 257),
        store.get("k" * 257),
        store.watch("k" * 257, after=0),
    ):
        with pytest.raises(TooLargeError, match="256"):
            await refused


async def test_the_number_of_keys_is_bounded(again: Open) -> None:
    store = await again()
    for i in range(4):
        await store.compare_and_set(f"key-{i}", b"", expected_version=0)
        await store.next_sequence(f"sequence-{i}")
    with pytest.raises(OverloadedError, match="8 keys"):
        await store.compare_and_set("one more", b"", expected_version=0)
    with pytest.raises(OverloadedError, match="8 keys"):
        await store.next_sequence("one more")
    assert await store.compare_and_set("key-0", b"x", expected_version=1) == Written(2)
