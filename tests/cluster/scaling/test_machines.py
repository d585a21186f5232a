"""A cluster whose processes run on several machines, without a supervisor: `indilog node`."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

import indilog
from indilog.runtime.cluster.cluster_keys import make_authority, make_node_keys
from tests.cluster.machine import Machine, machine, machines_running, next_release
from tests.cluster.scaling.test_forwarding import SLOW
from tests.cluster.scaling.test_scale import Load, command
from tests.support.clients import http_client
from tests.support.repeated import repeated
from tests.support.zookeeper_server import ZooKeeperServer

pytestmark = [pytest.mark.cluster, pytest.mark.zookeeper]


DEADLINE_S = 300.0
"""A lost machine is silent after 10 s, and its records are copied; other tests run beside it."""
FOURTH = {"storage-3", "engine-3", "index-0-2", "aggregator-3"}
FIFTH = {"storage-4", "engine-4"}


async def status(at: Machine) -> dict[str, Any]:
    async with http_client(at.url) as http:
        found: dict[str, Any] = (await http.get("/status")).json()
        return found


async def joined(at: Machine) -> set[str]:
    """Return which nodes of the fourth and fifth machine the newest view has."""
    layout = (await status(at))["layout"]
    index_nodes = [node for nodes in layout["index_shards"].values() for node in nodes]
    here = (*layout["storage_nodes"], *layout["engines"], *layout["aggregators"], *index_nodes)
    return (FOURTH | FIFTH) & set(here)


async def wait_for_joined(at: Machine, wanted: set[str]) -> None:
    """Wait until a machine shows these nodes of the fourth and fifth one: it learns of a view by
    itself, also after another machine or a command has seen it.
    """
    while await joined(at) != wanted:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.05)


async def wait_for_nodes(at: Machine, kind: str, wanted: set[str]) -> None:
    """Wait until a machine shows these nodes of a kind."""
    while set((await status(at))["layout"][kind]) != wanted:  # noqa: ASYNC110 - another process
        await asyncio.sleep(0.05)


@pytest.mark.repeated("tests/cluster/scaling/test_machines.py")
def test_machines_find_each_other_over_tls_and_outlive_the_loss_of_one(
    tmp_path: Path, zookeeper: ZooKeeperServer
) -> None:
    load = Load()

    async def story(machines: list[Machine]) -> None:
        first, second, third = machines
        async with asyncio.timeout(DEADLINE_S), indilog.connect(first.url) as client:
            log = client.log("scaled")
            await load.append(log, "before")
            third.kill()
            acknowledged = len(load.acknowledged)
            while len(load.acknowledged) < acknowledged + 20:
                await load.append(log, "without")
            await load.check(log)
            third.start()
            await asyncio.to_thread(third.wait_ready)
            assert third.name == "node-2", "it has its data directory"
            for url in (second.url, third.url):
                async with indilog.connect(url) as other:
                    await load.check(other.log("scaled"))

    keys = tmp_path / "keys"
    make_authority(keys)
    node_keys = make_node_keys(keys, "all")
    with machines_running(tmp_path, zookeeper, node_keys=node_keys) as machines:
        tokens = {(one.directory / "data" / "token").read_text() for one in machines}
        assert tokens == {(node_keys / "token").read_text()}
        assert [one.name for one in machines] == ["node-0", "node-1", "node-2"]
        uvloop.run(story(machines))
    assert load.checked == 3


@pytest.mark.repeated("tests/cluster/scaling/test_scale.py")
def test_machines_join_and_leave_or_are_drained_when_gone_while_callers_append(
    tmp_path: Path, zookeeper: ZooKeeperServer
) -> None:
    """The fourth one leaves in order. The fifth one, without sequencer and index node, is lost."""
    load = Load()

    async def story(machines: list[Machine], fourth: Machine, fifth: Machine) -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            indilog.connect(machines[0].url) as client,
            load.running(client.log("scaled")),
        ):
            fourth.start()
            await asyncio.to_thread(fourth.wait_ready)
            assert fourth.name == "node-3"
            await wait_for_joined(machines[0], FOURTH)
            async with indilog.connect(fourth.url) as there:
                await load.append(there.log("scaled"), "fourth")
                await load.check(there.log("scaled"))
            await command("drain", "node-3", "--url", machines[0].url)
            await wait_for_joined(machines[0], set())
            assert await asyncio.to_thread(fourth.wait_ended) == 0
            await load.check(client.log("scaled"))

            fifth.start()
            await asyncio.to_thread(fifth.wait_ready)
            assert fifth.name == "node-4", "a number is not used again"
            await wait_for_joined(machines[0], FIFTH)
            async with indilog.connect(fifth.url) as there:
                for _ in range(50):
                    await load.append(there.log("scaled"), "fifth")
            fifth.kill()
            while "engine-4" not in (await status(machines[0]))["silent"]:
                await load.more()
            await command("drain", "node-4", "--url", machines[0].url)
            await wait_for_joined(machines[0], set())
            await load.more()
            await load.check(client.log("scaled"))

    with machines_running(tmp_path, zookeeper) as machines:
        fourth = machine(tmp_path, 3, zookeeper)
        fifth = machine(tmp_path, 4, zookeeper, options=["--roles", "storage,compute"])
        try:
            uvloop.run(story(machines, fourth, fifth))
            fourth.start()
            assert fourth.wait_ended() == 2
            assert "node-3 has left the cluster" in fourth.output
        finally:
            fourth.kill()
            fifth.kill()
    assert any(data.startswith(b"fifth-") for data in load.acknowledged.values())


@pytest.mark.repeated("tests/cluster/scaling/test_scale.py")
def test_first_machines_are_replaced_by_later_ones(
    tmp_path: Path, zookeeper: ZooKeeperServer
) -> None:
    """One is drained under load, and one is gone; their sequencers are replaced, too."""
    load = Load()

    async def story(machines: list[Machine]) -> None:
        first, kept, gone, fourth, fifth = machines
        async with (
            asyncio.timeout(DEADLINE_S),
            indilog.connect(kept.url) as client,
            load.running(client.log("scaled")),
        ):
            for later in (fourth, fifth):
                later.start()
                await asyncio.to_thread(later.wait_ready)
            await command("drain", "node-0", "--url", kept.url)
            assert await asyncio.to_thread(first.wait_ended) == 0
            await wait_for_nodes(kept, "sequencers", {"sequencer-1", "sequencer-2", "sequencer-3"})
            gone.kill()
            while "engine-2" not in (await status(kept))["silent"]:
                await load.more()
            await command("drain", "node-2", "--url", kept.url)
            await wait_for_nodes(kept, "sequencers", {"sequencer-1", "sequencer-3", "sequencer-4"})
            await wait_for_nodes(kept, "engines", {"engine-1", "engine-3", "engine-4"})
            await load.more()
            await load.check(client.log("scaled"))

    with machines_running(tmp_path, zookeeper) as machines:
        later = [machine(tmp_path, number, zookeeper) for number in (3, 4)]
        try:
            uvloop.run(story([*machines, *later]))
            for left in (machines[0], machines[2]):
                left.start()
                assert left.wait_ended() == 2
                assert f"{left.name} has left the cluster" in left.output
        finally:
            for one in later:
                one.kill()


@pytest.mark.parametrize("upgraded", [1, repeated(3)])
def test_a_rolling_upgrade_fails_no_append_at_the_other_machines(
    tmp_path: Path, zookeeper: ZooKeeperServer, upgraded: int
) -> None:
    """The machines change to a release with more messages, fields and settings, one by one; so each
    restart is that of a rolling restart, too.
    """

    async def append(one: Machine, until: asyncio.Event) -> int:
        count = 0
        async with indilog.connect(one.url) as client:
            while not until.is_set():
                await client.log("rolling").append(b"x", tags=["t"])
                count += 1
        return count

    async def story(machines: list[Machine]) -> int:
        count = 0
        for one in machines[:upgraded]:
            restarted = asyncio.Event()
            others = [append(other, restarted) for other in machines if other is not one]
            async with asyncio.TaskGroup() as tasks:
                appending = [tasks.create_task(other) for other in others]
                assert await asyncio.to_thread(one.stop) == 0
                one.release = release
                one.start()
                await asyncio.to_thread(one.wait_ready)
                async with indilog.connect(one.url) as client:
                    await client.log("rolling").append(b"x", tags=["t"])
                restarted.set()
            count += 1 + sum(task.result() for task in appending)
        async with indilog.connect(machines[0].url) as client:
            found, bound = 0, 0
            while page := await client.log("rolling").read_range(tag="t", bound=bound, limit=1000):
                found, bound = found + len(page), page[-1].seqnum + 1
        assert found == count
        return count

    release = next_release(tmp_path)
    with machines_running(tmp_path, zookeeper) as machines:
        assert uvloop.run(story(machines)) > 0


@pytest.mark.repeated("tests/unit/runtime/cluster/test_machines.py")
def test_a_machine_that_does_not_fit_the_cluster_is_refused_in_one_sentence(
    tmp_path: Path, zookeeper: ZooKeeperServer
) -> None:
    def refused(of: Machine) -> str:
        of.start()
        assert of.wait_ended() == 2
        return of.output.splitlines()[-1]

    first = machine(tmp_path, 0, zookeeper)
    try:
        first.start()
        while "other machines are awaited" not in first.output:
            time.sleep(0.05)
        other = machine(tmp_path, 1, zookeeper)
        other.config.write_text("[cluster]\nshared_processes = 5\n")
        assert "The cluster was created with" in refused(other)
        other.config.write_text("[cluster]\nshared_processes = 2\n")
        assert "at least 3" in refused(other)
        same = machine(tmp_path, 2, zookeeper, {"node_port": first.settings["node_port"]})
        assert "is the address of node-0 already" in refused(same)
        unknown = machine(tmp_path, 3, zookeeper, options=["--roles", "compute,cook"])
        assert "There is no role 'cook'" in refused(unknown)
        embedded = machine(tmp_path, 4, zookeeper, {"metadata_store": "embedded"})
        assert 'metadata_store = "zookeeper"' in refused(embedded)
    finally:
        first.kill()


def answer_to_stranger(port: int) -> bytes:
    """Return the answer to a request over TLS without a certificate; empty: the connection ends."""
    context = ssl._create_unverified_context()
    with (
        suppress(OSError),
        socket.create_connection(("127.0.0.1", port)) as plain,
        context.wrap_socket(plain) as stranger,
    ):
        stranger.sendall(b"GET /apps HTTP/1.1\r\nhost: localhost\r\n\r\n")
        return stranger.recv(100)
    return b""


@pytest.mark.repeated("tests/cluster/scaling/test_forwarding.py")
def test_calls_run_on_the_machine_that_has_room(tmp_path: Path, zookeeper: ZooKeeperServer) -> None:
    """With node keys; a caller without them cannot use that port."""

    async def story(machines: list[Machine]) -> None:
        async with asyncio.timeout(DEADLINE_S), http_client(machines[0].url) as http:
            answer = await http.put("/apps/slow", json={"sources": {"slow.py": SLOW}})
            answer.raise_for_status()
            for one in machines:
                async with http_client(one.url) as other:
                    while not (await other.get("/apps")).json()["apps"]:
                        pass  # the deployment arrives through the log
            ran: set[int] = set()
            while len(ran) < len(machines):
                calls = [http.post("/functions/slow/who", json={"s": 0.3}) for _ in machines]
                ran |= {answer.json() for answer in await asyncio.gather(*calls)}
            figures = (await http.get("/status")).json()["gateway"]
            assert figures["calls_forwarded"] >= 2
            machines[2].kill()
            calls = [http.post("/functions/slow/who", json={"s": 0.1}) for _ in range(6)]
            answers = await asyncio.gather(*calls)
            assert [answer.status_code for answer in answers] == [200] * 6
            assert {answer.json() for answer in answers} <= ran

    keys = tmp_path / "keys"
    make_authority(keys)
    node_keys = make_node_keys(keys, "all")
    with machines_running(tmp_path, zookeeper, node_keys=node_keys, worker_calls_max=1) as machines:
        assert not answer_to_stranger(int(str(machines[0].settings["node_port"])) + 1)
        uvloop.run(story(machines))
