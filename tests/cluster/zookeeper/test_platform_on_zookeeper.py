"""A platform of processes that keeps its metadata in a real ZooKeeper."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import uvloop

from indilog.base.errors import (
    ConfigError,
    DataDirectoryError,
    QuorumUnavailableError,
)
from indilog.base.ids import NodeId
from indilog.base.log import Log
from indilog.config import Config
from indilog.runtime.cluster.assembly import embedded
from indilog.runtime.cluster.cluster_state import EPOCH_KEY, VIEW_KEY, layout_in, run_of
from indilog.runtime.cluster.supervisor import processes_config, supervised
from indilog.runtime.metadata.store import MetadataStore
from indilog.runtime.metadata.zookeeper import ZooKeeperMetadataStore
from tests.support.engine_in_process import ENGINE, append_retrying, engine_of
from tests.support.zookeeper_server import ZooKeeperServer, hosts_of

pytestmark = [pytest.mark.cluster, pytest.mark.zookeeper]

DEADLINE_S = 250.0


def config_on(zookeeper: ZooKeeperServer, directory: Path, **node: object) -> Config:
    """Return a configuration; the tests' own directory names the part of ZooKeeper."""
    settings = {
        "data_dir": str(directory),
        "port": 0,
        "workers": 1,
        "segment_bytes": 5 * 1024 * 1024,
        "metadata_store": "zookeeper",
        "metadata_timeout_s": 120.0,
        "hang_s": 600.0,  # a process that a busy machine lets wait does not hang
        "append_timeout_s": DEADLINE_S,
        "read_timeout_s": DEADLINE_S,
        "zookeeper_hosts": hosts_of([zookeeper]),
        "zookeeper_root": f"/{directory.parent.name}/{directory.name}",
    } | node
    return processes_config(overrides={"cluster": {"sequencers": 1}, "node": settings})


async def number_of_records(log: Log) -> int:
    return len(await log.read_range(tag="t", bound=0, limit=1000))


async def next_epoch(store: MetadataStore) -> int:
    return await store.next_sequence(EPOCH_KEY)


def test_a_platform_keeps_its_view_addresses_and_epochs_in_zookeeper(
    tmp_path: Path, zookeeper: ZooKeeperServer
) -> None:
    async def story() -> None:
        config = config_on(zookeeper, tmp_path)
        async with asyncio.timeout(DEADLINE_S):
            async with (
                await ZooKeeperMetadataStore.open(config.node) as store,
                supervised(config, left_out={ENGINE}) as supervisor,
                engine_of(supervisor) as log,
            ):
                await append_retrying(log, b"one")
                assert supervisor.view is not None
                view, run = await store.get(VIEW_KEY), await run_of(store)
                assert view is not None
                assert run is not None
                assert view.value == msgspec.json.encode(supervisor.view)
                assert run.addresses.keys() == set(supervisor.view.nodes)
                epochs = [await next_epoch(store)]
                assert epochs[0] > len(supervisor.view.nodes), "each node took one"
                assert set((await store.list_keys("journal/")).items) == {
                    f"journal/{node}" for node in supervisor.view.nodes
                }
            async with (
                await ZooKeeperMetadataStore.open(config.node) as store,
                supervised(config, left_out={ENGINE}) as supervisor,
                engine_of(supervisor) as log,
            ):
                assert await number_of_records(log) == 1
                epochs.append(await next_epoch(store))
                assert epochs[1] > epochs[0] + len(supervisor.view.nodes if supervisor.view else ())
                assert layout_in(tmp_path)[:2] == (supervisor.view, "processes")

    uvloop.run(story())


def test_the_data_path_continues_while_zookeeper_is_away_and_a_lost_node_returns_with_it(
    tmp_path: Path, zookeeper: ZooKeeperServer
) -> None:
    async def story() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            supervised(config_on(zookeeper, tmp_path), left_out={ENGINE}) as supervisor,
            engine_of(supervisor) as log,
        ):
            await append_retrying(log, b"before")
            zookeeper.kill()
            try:
                for i in range(20):
                    await append_retrying(log, b"away %d" % i)
                lost = supervisor.processes[NodeId("storage-0")]
                assert lost.pid is not None
                os.kill(lost.pid, signal.SIGKILL)
                returning = asyncio.create_task(lost.ready(restarts=1))
                assert await number_of_records(log) == 21
            finally:
                zookeeper.start()
                await asyncio.to_thread(zookeeper.wait_ready)
            await returning
            await append_retrying(log, b"back")
            assert await number_of_records(log) == 22

    uvloop.run(story())


@pytest.mark.repeated("tests/cluster/zookeeper/test_platform_on_zookeeper.py")
def test_the_whole_platform_runs_on_zookeeper(tmp_path: Path, zookeeper: ZooKeeperServer) -> None:
    file = tmp_path / "indilog.toml"
    file.write_text(
        "[node]\n[node.metadata]\n"
        'metadata_store = "zookeeper"\n'
        f'zookeeper_hosts = "{hosts_of([zookeeper])}"\n'
        f'zookeeper_root = "/{tmp_path.parent.name}/{tmp_path.name}"\n'
    )
    command = [sys.executable, "-m", "indilog", "up", "--processes", "--data", str(tmp_path / "d")]
    command += ["--port", "0", "--config", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "IndiLog is up" in process.stdout.readline()
        finally:
            process.terminate()
        assert process.wait(DEADLINE_S) == 0


def test_a_platform_in_one_process_runs_on_zookeeper_too(
    tmp_path: Path, zookeeper: ZooKeeperServer
) -> None:
    async def story() -> None:
        config = config_on(zookeeper, tmp_path)
        for expected in (1, 2):
            async with asyncio.timeout(DEADLINE_S), embedded(config) as platform:
                log = platform.logs.log("orders")
                await append_retrying(log, b"x")
                assert await number_of_records(log) == expected

    uvloop.run(story())


def test_a_data_directory_and_its_part_of_zookeeper_belong_together(
    tmp_path: Path, zookeeper: ZooKeeperServer
) -> None:
    root = f"/{tmp_path.parent.name}/{tmp_path.name}"
    mine = config_on(zookeeper, tmp_path / "mine", zookeeper_root=root)
    refused = (
        (
            ConfigError,
            "holds the metadata of another platform",
            config_on(zookeeper, tmp_path / "other", zookeeper_root=root),
        ),
        (
            ConfigError,
            'metadata_store = "zookeeper"',
            config_on(zookeeper, tmp_path / "mine", metadata_store="embedded"),
        ),
        (
            DataDirectoryError,
            "has lost the metadata",
            config_on(zookeeper, tmp_path / "mine", zookeeper_root=f"{root}/new"),
        ),
        (
            ConfigError,
            'metadata_store = "embedded"',
            config_on(zookeeper, tmp_path / "file", zookeeper_root=f"{root}/file"),
        ),
    )

    async def story() -> None:
        async with embedded(mine):
            pass
        async with embedded(config_on(zookeeper, tmp_path / "file", metadata_store="embedded")):
            pass
        for kind, words, config in refused:
            with pytest.raises(kind, match=words):
                async with embedded(config):
                    pass
        async with embedded(mine):
            pass

    uvloop.run(story())


def test_a_start_without_zookeeper_fails_in_one_sentence(
    tmp_path: Path, zookeeper: ZooKeeperServer
) -> None:
    async def story() -> None:
        config = config_on(
            zookeeper, tmp_path, zookeeper_hosts="127.0.0.1:1", metadata_timeout_s=0.5
        )
        with pytest.raises(QuorumUnavailableError, match=r"ZooKeeper at 127\.0\.0\.1:1 did not"):
            async with supervised(config):
                pass

    uvloop.run(story())
