"""A platform whose processes are connected over TCP with keys, and strangers that attack them."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
import uvloop

from bench.support.servers import free_port
from indilog.base.errors import QuorumUnavailableError
from indilog.base.ids import NodeId
from indilog.config import Config
from indilog.runtime.cluster.status_files import StatusFiles
from indilog.runtime.cluster.supervisor import processes_config, supervised
from tests.support.engine_in_process import ENGINE, append_retrying, engine_of
from tests.support.strangers import ATTACKS, two_clusters

pytestmark = pytest.mark.cluster

NODES_MAX = 16
"""Ports that a platform of these tests uses, at most."""


def free_ports() -> int:
    """Return the first of some ports that are all free."""
    while True:  # another process that looks for ports begins elsewhere
        first = free_port()
        try:
            for port in range(first, first + NODES_MAX):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


def config_in(directory: Path, keys: Path) -> Config:
    node = {
        "data_dir": str(directory / "data"), "port": 0, "segment_bytes": 5 * 1024 * 1024,
        "node_host": "127.0.0.1", "node_port": free_ports(), "node_keys": keys,
    }  # fmt: skip
    return processes_config(overrides={"cluster": {}, "node": node})


async def wait_for_count(run: Path, nodes: list[NodeId], count: int) -> None:
    """Wait until every node says that it refused so many peers."""
    async with asyncio.timeout(200):
        while True:
            status = StatusFiles(run).read(nodes).status
            if [status.get(node, {}).get("refused_peers") for node in nodes] == [count] * len(
                nodes
            ):
                return
            await asyncio.sleep(0.1)


def test_a_platform_serves_while_strangers_attack_all_its_ports(tmp_path: Path) -> None:
    clusters = two_clusters(tmp_path)
    config = config_in(tmp_path, clusters.own)
    first = config.node.messages.node_port

    async def attack(count: int) -> None:
        for port in range(first, first + count):
            for stranger in ATTACKS:
                await asyncio.to_thread(stranger, ("127.0.0.1", port), clusters)

    async def scenario() -> None:
        async with (
            supervised(config, left_out=[ENGINE]) as supervisor,
            engine_of(supervisor, clusters.own) as log,
        ):
            assert supervisor.view is not None
            attacking = asyncio.create_task(attack(1 + len(supervisor.view.nodes)))
            sent: list[int] = []
            while not attacking.done():
                sent.append(await append_retrying(log, b"%d" % len(sent)))
            await attacking
            sent.append(await append_retrying(log, b"after"))
            assert len(sent) > 1
            others = [node for node in supervisor.view.nodes if node != ENGINE]
            await wait_for_count(supervisor.run_directory, others, len(ATTACKS))
            assert sent == sorted(set(sent))
            found = await log.read_range(tag="t", limit=len(sent) + 1)
            assert [record.seqnum for record in found] == sent

    uvloop.run(scenario())


@pytest.mark.repeated("tests/cluster/faults/test_node_security.py")
def test_the_platform_does_not_start_with_keys_of_two_clusters(tmp_path: Path) -> None:
    """The compute node has a key of another cluster: it gets nothing, and says so."""
    clusters = two_clusters(tmp_path)
    config = config_in(tmp_path, clusters.own)

    async def scenario() -> None:
        async with supervised(config, left_out=[ENGINE]) as supervisor:
            with pytest.raises(QuorumUnavailableError, match="did not answer"):
                async with engine_of(supervisor, clusters.other):
                    raise AssertionError("it joined")

    uvloop.run(scenario())
