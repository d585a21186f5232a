"""One suite for every metadata store: keys, lists, watches, sequences and their limits.

`test_metadata_sessions` has the tests of sessions, and of an unreachable store.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from indilog.base.errors import ConfigError, OverloadedError, TooLargeError
from indilog.config import node_config
from indilog.runtime.metadata.store import Conflict, Deleted, MetadataStore, Versioned, Written
from tests.support.metadata_places import EMBEDDED, SERVED, ZOOKEEPER, Place, place_of

CONFIG = node_config(metadata_keys_max=8, metadata_value_bytes_max=1000, metadata_timeout_s=20.0)
LARGE = node_config(metadata_timeout_s=60.0)


@pytest_asyncio.fixture(params=[EMBEDDED, SERVED, ZOOKEEPER])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """Yield a new store."""
    async with place_of(request, tmp_path, CONFIG) as opened:
        yield opened


@pytest_asyncio.fixture(params=[EMBEDDED, SERVED, ZOOKEEPER])
async def large(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    """Yield a new store with the limits of production."""
    async with place_of(request, tmp_path, LARGE) as opened:
        yield opened


pytestmark = pytest.mark.asyncio


async def written(store: MetadataStore, key: str, value: bytes, expected: int = 0) -> int:
    """Set a key that must take the value; return its version."""
    outcome = await store.compare_and_set(key, value, expected_version=expected)
    assert isinstance(outcome, Written)
    return outcome.version


async def waiting(store: MetadataStore) -> None:
    """Give watches that were begun before the time to start waiting."""
    for _ in range(3):
        await asyncio.sleep(0)
        await store.get("view")


async def test_a_key_that_was_never_set_has_no_value(place: Place) -> None:
    assert await (await place.client()).get("view") is None


async def test_a_set_value_is_read_back_with_its_version(place: Place) -> None:
    store, other = await place.client(), await place.client()
    first = await written(store, "view", b"one")
    assert first > 0
    assert await other.get("view") == Versioned(b"one", first)
    second = await written(store, "view", b"two", first)
    assert second > first
    assert await other.get("view") == Versioned(b"two", second)


async def test_an_empty_value_is_a_value(place: Place) -> None:
    store = await place.client()
    version = await written(store, "view", b"")
    assert await store.get("view") == Versioned(b"", version)


async def test_a_stale_write_changes_nothing_and_returns_the_version(place: Place) -> None:
    store = await place.client()
    first = await written(store, "view", b"one")
    second = await written(store, "view", b"two", first)
    for expected in (0, first, second + 1):
        stale = store.compare_and_set("view", b"x", expected_version=expected)
        assert await stale == Conflict(second)
    assert await store.get("view") == Versioned(b"two", second)


async def test_a_write_that_expects_a_value_conflicts_with_an_absent_one(place: Place) -> None:
    store = await place.client()
    assert await store.compare_and_set("view", b"x", expected_version=1) == Conflict(0)
    assert await store.get("view") is None


async def test_exactly_one_of_several_concurrent_writers_wins_each_version(place: Place) -> None:
    clients = [await place.client() for _ in range(4)]
    version = 0
    for _ in range(3):
        outcomes = await asyncio.gather(
            *(
                clients[i % 4].compare_and_set("view", bytes([i]), expected_version=version)
                for i in range(20)
            )
        )
        winners = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Written)]
        assert len(winners) == 1
        found = await clients[0].get("view")
        assert found is not None
        assert found.value == bytes(winners)
        assert set(outcomes) == {Written(found.version), Conflict(found.version)}
        version = found.version


async def test_increments_by_compare_and_set_are_never_lost(place: Place) -> None:
    async def increment(store: MetadataStore) -> None:
        for _ in range(10):
            while True:
                found = await store.get("count")
                count, version = (int(found.value), found.version) if found else (0, 0)
                new = str(count + 1).encode()
                outcome = await store.compare_and_set("count", new, expected_version=version)
                if isinstance(outcome, Written):
                    break

    clients = [await place.client() for _ in range(4)]
    await asyncio.gather(*(increment(store) for store in clients))
    found = await clients[0].get("count")
    assert found is not None
    assert found.value == b"40"


async def test_a_key_is_deleted_only_at_the_expected_version(place: Place) -> None:
    store = await place.client()
    first = await written(store, "view", b"one")
    second = await written(store, "view", b"two", first)
    assert await store.delete("view", expected_version=first) == Conflict(second)
    assert await store.get("view") == Versioned(b"two", second)
    assert await store.delete("view", expected_version=second) == Deleted()
    assert await store.get("view") is None
    assert await store.delete("view", expected_version=second) == Deleted()


async def test_the_version_of_a_key_never_goes_back_also_after_it_was_deleted(
    place: Place,
) -> None:
    store = await place.client()
    version = 0
    for _ in range(3):
        created = await written(store, "view", b"x")
        assert created > version
        version = created
        await store.delete("view", expected_version=created)
    recreated = await written(store, "view", b"x")
    assert recreated > version
    stale = store.compare_and_set("view", b"late", expected_version=version)
    assert await stale == Conflict(recreated)


async def test_a_directory_lists_its_own_keys_only(place: Place) -> None:
    store = await place.client()
    assert await store.list_keys("nodes/") == ({}, 0)
    versions = {
        key: await written(store, key, key.encode())
        for key in ("view", "nodes/a", "nodes/é b%", "nodes/x/y", "nodes")
    }
    for directory, keys in (
        ("", ["view", "nodes"]),
        ("nodes/", ["nodes/a", "nodes/é b%"]),
        ("nodes/x/", ["nodes/x/y"]),
        ("none/", []),
    ):
        listing = await store.list_keys(directory)
        assert listing.items == {key: Versioned(key.encode(), versions[key]) for key in keys}


async def test_the_revision_of_a_directory_grows_with_each_change_in_it(place: Place) -> None:
    store = await place.client()
    revisions = [(await store.list_keys("nodes/")).revision]
    version = await written(store, "nodes/a", b"one")
    revisions.append((await store.list_keys("nodes/")).revision)
    version = await written(store, "nodes/a", b"two", version)
    revisions.append((await store.list_keys("nodes/")).revision)
    await written(store, "elsewhere/b", b"")
    assert (await store.list_keys("nodes/")).revision == revisions[-1]
    await store.delete("nodes/a", expected_version=version)
    revisions.append((await store.list_keys("nodes/")).revision)
    assert revisions == sorted(set(revisions))


async def test_a_list_shows_all_keys_as_they_were_together_at_one_moment(place: Place) -> None:
    """The writer always sets `b` after `a` to the same number, so `b` never exceeds `a`.

    The values are so long that a message has room for one of them.
    """
    writer, reader = await place.client(), await place.client()
    done = asyncio.Event()

    async def write() -> None:
        a = b = 0
        for number in range(150):
            a = await written(writer, "d/a", str(number).encode().ljust(600), a)
            b = await written(writer, "d/b", str(number).encode().ljust(600), b)
        done.set()

    task = asyncio.create_task(write())
    revision = -1
    while not done.is_set():
        await asyncio.sleep(0)
        listing = await reader.list_keys("d/")
        assert listing.revision >= revision
        revision = listing.revision
        if len(listing.items) == 2:
            a, b = (int(listing.items[key].value) for key in ("d/a", "d/b"))
            assert b <= a <= b + 1
            assert max(found.version for found in listing.items.values()) == revision
    await task
    final = (await reader.list_keys("d/")).items
    assert {key: int(found.value) for key, found in final.items()} == {"d/a": 149, "d/b": 149}


async def test_a_list_of_more_bytes_than_one_message_carries_is_complete(large: Place) -> None:
    store = await large.client()
    value = b"x" * 400_000
    versions = {f"d/{i}": await written(store, f"d/{i}", value) for i in range(6)}
    listing = await store.list_keys("d/")
    assert listing.items == {key: Versioned(value, versions[key]) for key in versions}


async def test_each_sequence_counts_from_one(place: Place) -> None:
    store = await place.client()
    assert [await store.next_sequence("a") for _ in range(3)] == [1, 2, 3]
    assert await store.next_sequence("b") == 1


async def test_a_number_of_a_sequence_is_issued_once(place: Place) -> None:
    clients = [await place.client() for _ in range(4)]
    numbers = await asyncio.gather(*(clients[i % 4].next_sequence("a") for i in range(40)))
    assert len(set(numbers)) == 40


async def test_values_and_sequences_survive_a_restart(place: Place) -> None:
    store = await place.client()
    version = await written(store, "view", b"one")
    gone = await written(store, "gone", b"")
    await store.delete("gone", expected_version=gone)
    number = await store.next_sequence("epoch")
    revision = (await store.list_keys("")).revision
    store = await place.restart()
    assert await store.get("view") == Versioned(b"one", version)
    assert (await store.list_keys("")).revision >= revision
    assert await store.next_sequence("epoch") > number
    assert await written(store, "gone", b"") > gone
    assert await written(store, "view", b"two", version) > version


async def test_a_watch_returns_at_once_for_an_already_newer_version(place: Place) -> None:
    store = await place.client()
    version = await written(store, "view", b"one")
    assert await store.watch("view", after=0) == Versioned(b"one", version)


async def test_a_watch_waits_for_the_change(place: Place) -> None:
    store, other = await place.client(), await place.client()
    version = await written(store, "view", b"one")
    watch = asyncio.create_task(store.watch("view", after=version))
    await written(other, "other", b"x")
    await waiting(store)
    assert not watch.done()
    second = await written(other, "view", b"two", version)
    assert await watch == Versioned(b"two", second)


async def test_a_watch_waits_for_a_key_that_does_not_exist_yet(place: Place) -> None:
    store, other = await place.client(), await place.client()
    watches = [asyncio.create_task(store.watch("view", after=0)) for _ in range(5)]
    await waiting(store)
    version = await written(other, "view", b"one")
    assert await asyncio.gather(*watches) == [Versioned(b"one", version)] * 5


async def test_a_watch_reports_that_the_key_was_deleted(place: Place) -> None:
    store, other = await place.client(), await place.client()
    version = await written(store, "view", b"one")
    watch = asyncio.create_task(store.watch("view", after=version))
    await waiting(store)
    await other.delete("view", expected_version=version)
    assert await watch is None
    assert await store.watch("view", after=version) is None


async def test_a_watch_can_be_cancelled(place: Place) -> None:
    store = await place.client()
    for _ in range(3):
        watch = asyncio.create_task(store.watch("view", after=0))
        await waiting(store)
        watch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watch
    version = await written(store, "view", b"one")
    assert await store.get("view") == Versioned(b"one", version)
    assert await store.watch("view", after=0) == Versioned(b"one", version)


async def test_a_watch_of_a_directory_sees_new_changed_and_deleted_keys(place: Place) -> None:
    store, other = await place.client(), await place.client()
    revision, version, changed = 0, 0, 0
    for value in (b"one", b"two"):
        watch = asyncio.create_task(store.watch_directory("nodes/", after=revision))
        await waiting(store)
        await written(other, "elsewhere/a", value, 0 if value == b"one" else version)
        assert not watch.done()
        changed = await written(other, "nodes/a", value, changed)
        listing = await watch
        assert listing.items == {"nodes/a": Versioned(value, changed)}
        assert listing.revision > revision
        revision = listing.revision
        there = await other.get("elsewhere/a")
        assert there is not None
        version = there.version
    watch = asyncio.create_task(store.watch_directory("nodes/", after=revision))
    await other.delete("nodes/a", expected_version=changed)
    assert (await watch).items == {}


@pytest.mark.parametrize(
    "large",
    [
        EMBEDDED,
        SERVED,
        pytest.param(
            *ZOOKEEPER.values, id=ZOOKEEPER.id, marks=[*ZOOKEEPER.marks, pytest.mark.repeated]
        ),
    ],
    indirect=True,
)
async def test_no_watcher_misses_the_last_value_of_a_storm(large: Place) -> None:
    """A hundred watchers and three hundred changes; each watcher skips what it cannot follow."""
    keys, changes, watchers = 10, 300, 100
    writers = [await large.client() for _ in range(4)]
    readers = [await large.client() for _ in range(3)]
    last = str(changes // keys - 1).encode()

    async def follow(store: MetadataStore, key: str) -> int:
        version, steps = 0, 0
        while True:
            found = await store.watch(key, after=version)
            assert found is not None
            assert found.version > version
            version, steps = found.version, steps + 1
            if found.value == last:
                return steps

    async def follow_directory(store: MetadataStore) -> None:
        revision = 0
        while True:
            listing = await store.watch_directory("d/", after=revision)
            assert listing.revision > revision
            revision = listing.revision
            values = [found.value for found in listing.items.values()]
            if values == [last] * keys:
                return

    async def write(key: str, store: MetadataStore) -> None:
        version = 0
        for number in range(changes // keys):
            version = await written(store, key, str(number).encode(), version)

    following = [
        asyncio.create_task(follow(readers[i % 3], f"d/{i % keys}")) for i in range(watchers)
    ]
    following_directory = [asyncio.create_task(follow_directory(readers[i % 3])) for i in range(10)]
    await asyncio.gather(*(write(f"d/{i}", writers[i % 4]) for i in range(keys)))
    steps = await asyncio.gather(*following)
    await asyncio.gather(*following_directory)
    assert max(steps) <= changes // keys


async def test_a_value_at_its_limit_is_accepted_and_a_larger_one_refused(place: Place) -> None:
    store = await place.client()
    version = await written(store, "view", b"x" * 1000)
    with pytest.raises(TooLargeError, match="1,000"):
        await store.compare_and_set("view", b"x" * 1001, expected_version=version)
    assert await store.get("view") == Versioned(b"x" * 1000, version)


async def test_a_key_at_its_limit_is_accepted_and_a_longer_one_refused(place: Place) -> None:
    store = await place.client()
    await written(store, "k" * 256, b"")
    await written(store, "é" * 126 + "/xé", b"")  # 256 bytes, 129 characters
    long = "k" * 257
    for refused in (
        store.compare_and_set(long, b"", expected_version=0),
        store.delete(long, expected_version=0),
        store.next_sequence(long),
        store.get(long),
        store.watch(long, after=0),
        store.list_keys(long + "/"),
        store.watch_directory(long + "/", after=0),
    ):
        with pytest.raises(TooLargeError, match="256"):
            await refused


async def test_a_key_without_a_name_is_refused(place: Place) -> None:
    store = await place.client()
    for key in ("", "/", "nodes/"):
        with pytest.raises(ConfigError, match="it has no name"):
            await store.compare_and_set(key, b"", expected_version=0)
    with pytest.raises(ConfigError, match="add a slash"):
        await store.list_keys("nodes")


async def test_names_that_mean_something_elsewhere_are_names(place: Place) -> None:
    store = await place.client()
    for key in (".", "../..", "a//b", "zookeeper/config"):
        version = await written(store, key, key.encode())
        assert await store.get(key) == Versioned(key.encode(), version)


async def test_the_number_of_keys_is_bounded(place: Place) -> None:
    store = await place.client()
    for i in range(4):
        version = await written(store, f"key-{i}", b"")
        await store.next_sequence(f"sequence-{i}")
    with pytest.raises(OverloadedError, match="8 keys"):
        await store.compare_and_set("one more", b"", expected_version=0)
    with pytest.raises(OverloadedError, match="8 keys"):
        await store.next_sequence("one more")
    version = await written(store, "key-3", b"x", version)
    await store.delete("key-3", expected_version=version)
    await written(store, "one more", b"")
