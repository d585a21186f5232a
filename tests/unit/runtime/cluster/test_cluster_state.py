"""Cluster state in the metadata store: the run, the layout and the process epochs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indilog.base.errors import ConfigError, DataDirectoryError, NotReadyError
from indilog.base.ids import NodeId
from indilog.config import ClusterConfig, Config, NodeConfig, config_from, node_config
from indilog.config.node import GROUP_OF
from indilog.kernel.view import view_of
from indilog.runtime.cluster.cluster_state import (
    VIEW_KEY,
    claim_arrangement,
    node_start,
    publish_run,
    settings_of,
)
from indilog.runtime.metadata.embedded import EmbeddedMetadataStore

VIEW = view_of(storage_nodes=2, replicas=2)
ADDRESSES = {node: f"ipc:///run/{node}" for node in VIEW.nodes}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedMetadataStore]:
    with EmbeddedMetadataStore(tmp_path / "metadata", NodeConfig()) as opened:
        yield opened


def test_a_node_starts_with_the_published_cluster_state(store: EmbeddedMetadataStore) -> None:
    config = Config(
        cluster=ClusterConfig(storage_nodes=2, replicas=2, durability="memory"),
        node=node_config(data_dir=Path("/data/with space"), resend_s=0.125, port=0),
    )

    async def story() -> None:
        await store.compare_and_set(VIEW_KEY, msgspec.json.encode(VIEW), expected_version=0)
        assert await publish_run(store, config, ADDRESSES, Path("/run/x")) is None
        start = await node_start(store)
        assert start.config == config
        assert start.view == VIEW
        assert start.addresses == ADDRESSES

    asyncio.run(story())


def test_each_start_has_a_greater_epoch(store: EmbeddedMetadataStore) -> None:
    async def story() -> None:
        await store.compare_and_set(VIEW_KEY, msgspec.json.encode(VIEW), expected_version=0)
        await publish_run(store, Config(), ADDRESSES, Path("/run/x"))
        epochs = [(await node_start(store)).epoch for _ in range(3)]
        assert epochs == sorted(set(epochs))

    asyncio.run(story())


def test_a_new_run_replaces_the_previous_run_and_returns_it(store: EmbeddedMetadataStore) -> None:
    async def story() -> None:
        await publish_run(store, Config(), ADDRESSES, Path("/run/first"))
        second = {NodeId("storage-0"): "tcp://127.0.0.1:1"}
        before = await publish_run(store, Config(), second, Path("/run/second"))
        assert before is not None
        assert (before.directory, before.addresses) == ("/run/first", ADDRESSES)
        again = await publish_run(store, Config(), ADDRESSES, Path("/run/third"))
        assert again is not None
        assert (again.directory, again.addresses) == ("/run/second", second)

    asyncio.run(story())


@pytest.mark.parametrize("published", ["nothing", "view", "run"])
def test_a_node_gets_a_retryable_error_until_the_cluster_state_is_published(
    store: EmbeddedMetadataStore, published: str
) -> None:
    async def story() -> None:
        if published == "view":
            await store.compare_and_set(VIEW_KEY, msgspec.json.encode(VIEW), expected_version=0)
        if published == "run":
            await publish_run(store, Config(), ADDRESSES, Path("/run/x"))
        with pytest.raises(NotReadyError, match="not published"):
            await node_start(store)

    asyncio.run(story())


@pytest.mark.parametrize(("key", "words"), [("view", "another release"), ("run", "first process")])
def test_cluster_state_of_another_release_is_refused_in_one_sentence(
    store: EmbeddedMetadataStore, key: str, words: str
) -> None:
    async def story() -> None:
        await store.compare_and_set(VIEW_KEY, msgspec.json.encode(VIEW), expected_version=0)
        await publish_run(store, Config(), ADDRESSES, Path("/run/x"))
        found = await store.get(key)
        assert found is not None
        newer = b'{"newer": true}'
        await store.compare_and_set(key, newer, expected_version=found.version)
        with pytest.raises((ConfigError, DataDirectoryError), match=words):
            await node_start(store)
        if key == "run":  # a start replaces the run record without reading it
            assert await publish_run(store, Config(), ADDRESSES, Path("/run/y")) is None

    asyncio.run(story())


def test_a_restart_with_the_other_process_arrangement_is_refused(
    store: EmbeddedMetadataStore,
) -> None:
    async def story() -> None:
        for _ in range(2):
            await claim_arrangement(store, "processes")
        with pytest.raises(ConfigError, match="as separate processes; this start runs embedded"):
            await claim_arrangement(store, "embedded")

    asyncio.run(story())


@given(
    replicas=st.integers(1, 5),
    timeout_s=st.floats(min_value=1e-6, max_value=1e6),
    data_dir=st.text(
        st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1
    ).map(Path),
)
def test_every_configuration_survives_publication(
    replicas: int, timeout_s: float, data_dir: Path
) -> None:
    config = Config(
        cluster=ClusterConfig(storage_nodes=5, replicas=replicas),
        node=node_config(data_dir=data_dir, import_timeout_s=timeout_s),
    )
    settings = msgspec.json.decode(msgspec.json.encode(settings_of(config)))
    assert config_from(overrides=settings) == config
    assert settings["node"].keys() == GROUP_OF.keys()
