"""A cluster of processes: restarts, adoption by the next supervisor, durable data."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import uvloop

from indilog.base.errors import ConfigError, DataDirectoryError, IndilogError
from indilog.base.ids import NodeId
from indilog.base.log import Log
from indilog.config import Config
from indilog.runtime.cluster.assembly import embedded
from indilog.runtime.cluster.supervised_process import SupervisedProcess
from indilog.runtime.cluster.supervisor import processes_config, supervised
from tests.support.clients import http_client, token_headers
from tests.support.engine_in_process import ENGINE, append_retrying, engine_of
from tests.support.repeated import repeated

pytestmark = pytest.mark.cluster

DEADLINE_S = 200.0
SMALL = {"sequencers": 1, "storage_nodes": 1, "replicas": 1, "index_shards": 1}
"""A cluster of five processes, which start in half of the time of the default's nine."""
SUPERVISOR = """
import asyncio, json, signal, sys
from indilog.runtime.cluster.supervisor import processes_config, supervised
from indilog.base.telemetry import configure_logging

async def main():
    configure_logging()
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)
    overrides = json.loads(sys.argv[1])
    async with supervised(processes_config(overrides=overrides)) as supervisor:
        pids = [p.pid for p in supervisor.processes.values()]
        print(json.dumps([pids, supervisor.url]), flush=True)
        await asked.wait()

asyncio.run(main())
"""
RUN = """
import json, sys
from indilog.runtime.cluster.supervisor import processes_config, run_processes
from indilog.base.telemetry import configure_logging

configure_logging()
config = processes_config(overrides=json.loads(sys.argv[1]))
run_processes(config, on_ready=lambda url: print("up", flush=True))
"""


def settings(directory: Path, **cluster: int) -> dict[str, dict[str, object]]:
    node = {"data_dir": str(directory), "port": 0, "workers": 1, "segment_bytes": 5 * 1024 * 1024}
    # A process that a busy machine lets wait does not hang, and its restart takes long.
    node |= {"hang_s": 600.0, "append_timeout_s": DEADLINE_S, "read_timeout_s": DEADLINE_S}
    return {"cluster": dict(cluster), "node": node}


def config_in(directory: Path, **cluster: int) -> Config:
    return processes_config(overrides=settings(directory, **cluster))


async def all_data(log: Log) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    bound = 0
    while records := await log.read_range(tag="t", bound=bound, limit=1000):
        found |= {record.seqnum: record.data for record in records}
        bound = records[-1].seqnum + 1
    return found


@pytest.mark.repeated("tests/cluster/faults/test_kill_platform.py")
def test_a_cluster_of_processes_keeps_acknowledged_records_over_a_restart(tmp_path: Path) -> None:
    async def first() -> dict[int, bytes]:
        async with (
            supervised(config_in(tmp_path), left_out={ENGINE}) as supervisor,
            engine_of(supervisor) as log,
        ):
            seqnums = await asyncio.gather(*(log.append(b"%d" % i, tags=["t"]) for i in range(500)))
            return {seqnum: b"%d" % i for i, seqnum in enumerate(seqnums)}

    async def second() -> dict[int, bytes]:
        async with (
            supervised(config_in(tmp_path), left_out={ENGINE}) as supervisor,
            engine_of(supervisor) as log,
        ):
            return await all_data(log)

    acknowledged = uvloop.run(first())
    assert len(acknowledged) == 500
    assert uvloop.run(second()) == acknowledged


@pytest.mark.parametrize(
    "node", ["storage-0", *map(repeated, ("sequencer-0", "sequencer-1", "index-1-0"))]
)
def test_a_killed_process_comes_back_and_nothing_is_lost(tmp_path: Path, node: str) -> None:
    async def story() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            supervised(config_in(tmp_path), left_out={ENGINE}) as supervisor,
            engine_of(supervisor) as log,
        ):
            process = supervisor.processes[NodeId(node)]
            assert process.pid is not None
            before = {
                await append_retrying(log, b"before %d" % i): b"before %d" % i for i in range(20)
            }
            os.kill(process.pid, signal.SIGKILL)
            during = {
                await append_retrying(log, b"during %d" % i): b"during %d" % i for i in range(20)
            }
            await process.ready(restarts=1)
            after = {
                await append_retrying(log, b"after %d" % i): b"after %d" % i for i in range(20)
            }
            found = await all_data(log)
            assert (before | during | after).items() <= found.items()
            assert process.restarts == 1

    uvloop.run(story())


def fork_server_of(process: SupervisedProcess) -> int:
    """Return the process that has forked this one."""
    stat = Path(f"/proc/{process.pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


@pytest.mark.repeated("tests/cluster/faults/test_kill_platform.py")
@pytest.mark.parametrize("killed", ["every process at once", repeated("the compute node")])
def test_a_gateway_of_a_cluster_answers_again_after_a_kill(tmp_path: Path, killed: str) -> None:
    async def story() -> None:
        async with asyncio.timeout(DEADLINE_S), supervised(config_in(tmp_path)) as supervisor:
            url = supervisor.url
            async with http_client(url) as client:
                for i in range(5):
                    record = {"data": f"record {i}", "tags": ["t"]}
                    answer = await client.post("/logs/orders/records", json=record)
                    assert answer.status_code == 201
            processes = list(supervisor.processes.values())
            if killed == "the compute node":
                processes = [supervisor.processes[ENGINE]]
            for pid in [fork_server_of(processes[0]), *(process.pid for process in processes)]:
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            await asyncio.gather(*(process.ready(restarts=1) for process in processes))
            assert supervisor.url == url, "the port that was chosen first"
            async with http_client(url, timeout=DEADLINE_S) as client:
                answer = await client.get("/logs/orders/records", params={"tag": "t"})
                data = [record["data"] for record in answer.json()["records"]]
                assert data == [f"record {i}" for i in range(5)]

    uvloop.run(story())


@contextmanager
def program(code: str, directory: Path, **node: float) -> Iterator[subprocess.Popen[str]]:
    """Run a Python program that gets the settings of a cluster, and stop it at the end."""
    given = settings(directory, **SMALL)
    given["node"].update(node)
    command = [sys.executable, "-c", code, json.dumps(given)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(DEADLINE_S)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the program ended"
    return line


def wait_until_gone(pids: list[int], descriptors: list[int]) -> None:
    """Wait for the end of processes that are not our children."""
    for pid, descriptor in zip(pids, descriptors, strict=True):
        readable, _, _ = select.select([descriptor], [], [], DEADLINE_S)
        assert readable, f"process {pid} still lives"


def test_when_the_supervisor_is_killed_its_processes_continue_and_the_next_one_adopts_them(
    tmp_path: Path,
) -> None:
    record = {"data": "while there is no supervisor", "tags": ["t"]}
    with program(SUPERVISOR, tmp_path) as first:
        pids, url = json.loads(line_of(first))
        assert len(pids) == 5
        first.kill()
        first.wait(DEADLINE_S)
        known = token_headers(url)
        appended = httpx.post(
            f"{url}/logs/orders/records", json=record, headers=known, timeout=DEADLINE_S
        )
        assert appended.status_code == 201
        os.kill(pids[0], signal.SIGKILL)  # no supervisor restarts it, until the next one starts
    with program(SUPERVISOR, tmp_path) as second:
        adopted, url_again = json.loads(line_of(second))
        assert len(set(adopted) & set(pids)) == 4
        assert url_again == url
        found = httpx.get(
            f"{url}/logs/orders/records",
            params={"tag": "t"},
            headers=token_headers(url),
            timeout=DEADLINE_S,
        ).json()
        assert [each["data"] for each in found["records"]] == [record["data"]]
        descriptors = [os.pidfd_open(pid) for pid in adopted]
    with ExitStack() as stack:
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        wait_until_gone(adopted, descriptors)


def test_the_processes_of_a_killed_supervisor_can_be_stopped(tmp_path: Path) -> None:
    with program(SUPERVISOR, tmp_path) as first:
        pids, _ = json.loads(line_of(first))
        descriptors = [os.pidfd_open(pid) for pid in pids]
        refused = indilog("down", "--data", str(tmp_path))
        assert refused.returncode != 0
        assert "in use by another process" in refused.stderr
        first.kill()
        first.wait(DEADLINE_S)
    assert indilog("down", "--data", str(tmp_path)).stdout == f"Stopped {len(pids)} processes.\n"
    with ExitStack() as stack:
        for descriptor in descriptors:
            stack.callback(os.close, descriptor)
        wait_until_gone(pids, descriptors)
    assert indilog("down", "--data", str(tmp_path)).stdout == "No process was running.\n"
    assert "holds no platform" in indilog("down", "--data", str(tmp_path / "none")).stderr


def indilog(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "indilog", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_a_supervisor_with_other_settings_replaces_the_processes_of_the_one_before(
    tmp_path: Path,
) -> None:
    with program(SUPERVISOR, tmp_path) as first:
        pids, _ = json.loads(line_of(first))
        first.kill()
    with program(SUPERVISOR, tmp_path, resend_s=0.3) as second:
        others, _ = json.loads(line_of(second))
        assert len(others) == 5
        assert not set(others) & set(pids)


async def is_appended(client: httpx.AsyncClient, record: Mapping[str, object]) -> bool:
    """Append; False: on a busy machine another process was ended, too, and is not back yet."""
    try:
        return (await client.post("/logs/orders/records", json=record)).status_code == 201
    except httpx.TransportError:
        return False


@pytest.mark.repeated("tests/unit/runtime/cluster/test_supervised_process.py")
@pytest.mark.parametrize("node", ["engine-0", repeated("storage-1"), repeated("sequencer-0")])
def test_a_hung_process_is_ended_and_appends_continue(tmp_path: Path, node: str) -> None:
    """Formerly no append was acknowledged for 20 seconds, and `/readyz` answered ready."""

    async def story() -> None:
        made = settings(tmp_path)
        made["node"]["hang_s"] = 5.0
        config = processes_config(overrides=made)
        async with asyncio.timeout(DEADLINE_S), supervised(config) as supervisor:
            process = supervisor.processes[NodeId(node)]
            assert process.pid is not None
            os.kill(process.pid, signal.SIGSTOP)
            await process.ready(restarts=1)
            record = {"data": "after", "tags": ["t"]}
            async with http_client(supervisor.url, timeout=DEADLINE_S) as client:
                while not await is_appended(client, record):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

    uvloop.run(story())


def test_readyz_answers_whether_an_append_would_be_acknowledged(tmp_path: Path) -> None:
    async def story() -> None:
        made = settings(tmp_path, **SMALL)
        made["node"].update(ready_append_s=1.0, primary_lost_s=600.0)
        config = processes_config(overrides=made)
        async with (
            asyncio.timeout(DEADLINE_S),
            supervised(config) as supervisor,
            http_client(supervisor.url, timeout=DEADLINE_S) as client,
        ):
            while (await client.get("/readyz")).status_code != 200:
                pass
            for node in ("sequencer-0", "storage-0"):
                pid = supervisor.processes[NodeId(node)].pid
                assert pid is not None
                os.kill(pid, signal.SIGSTOP)
                while (answer := await client.get("/readyz")).status_code == 200:
                    pass
                assert "was not acknowledged within 1 s" in answer.json()["detail"]
                os.kill(pid, signal.SIGCONT)
                while (answer := await client.get("/readyz")).status_code != 200:
                    pass

    uvloop.run(story())


def test_sigterm_stops_everything_in_order(tmp_path: Path) -> None:
    with program(RUN, tmp_path) as process:
        assert line_of(process) == "up\n"
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
    journals = [tmp_path / name for name in ("storage-0", "sequencer-0", "index-0-0")]
    assert all(journal.is_dir() for journal in journals)


@pytest.mark.repeated("tests/cluster/test_start.py")
def test_a_cluster_ends_with_the_program_that_started_it_if_so_configured(
    tmp_path: Path,
) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "indilog", "up", "--processes", "--data", str(tmp_path)]
    command += ["--port", "0", "--supervisor-fd", str(theirs.fileno())]
    with (
        theirs,
        ours,
        subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        theirs.close()
        assert "IndiLog is up" in line_of(process)
        ours.close()
        assert process.wait(DEADLINE_S) == 0


def test_sigterm_before_the_cluster_is_up_stops_everything_too(tmp_path: Path) -> None:
    with program(RUN, tmp_path) as process:
        metadata = tmp_path / "metadata"
        while not metadata.exists():
            assert process.poll() is None
        process.terminate()
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.repeated("tests/unit/runtime/metadata/test_embedded.py")
def test_a_second_supervisor_on_the_same_data_is_refused(tmp_path: Path) -> None:
    async def story() -> None:
        config = config_in(tmp_path)
        async with supervised(config, left_out={ENGINE}):
            with pytest.raises(DataDirectoryError, match="in use by another process"):
                async with supervised(config):
                    pass

    uvloop.run(story())


def test_the_data_of_processes_is_not_opened_embedded_nor_with_another_layout(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with supervised(config_in(tmp_path), left_out={ENGINE}):
            pass
        with pytest.raises(ConfigError, match="runs as separate processes"):
            async with embedded(config_in(tmp_path)):
                pass
        with pytest.raises(ConfigError, match="another layout"):
            async with supervised(config_in(tmp_path, sequencers=1)):
                pass

    uvloop.run(story())


@pytest.mark.repeated("tests/unit/runtime/cluster/test_layout.py")
def test_the_index_tier_of_a_cluster_may_change_between_two_starts(tmp_path: Path) -> None:
    """New index shards get later appends; storage rebuilds the rows of a retired one."""

    async def story() -> None:
        for starts, index_shards in enumerate((2, 1), 1):
            config = config_in(tmp_path, index_shards=index_shards, sequencers=1)
            async with (
                supervised(config, left_out={ENGINE}) as supervisor,
                engine_of(supervisor) as log,
            ):
                await asyncio.gather(*(log.append(b"%d" % i, tags=["t"]) for i in range(100)))
                assert len(await all_data(log)) == 100 * starts
                assert supervisor.view is not None
                assert len(supervisor.view.index_shards) == 2
                assert supervisor.view.eras[-1].shards == tuple(range(index_shards))

    uvloop.run(story())


@pytest.mark.repeated("tests/unit/runtime/cluster/test_supervised_process.py")
def test_a_node_that_cannot_start_ends_the_start_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "storage-0").mkdir()
    (tmp_path / "storage-0" / "FORMAT").write_text("999\n")

    async def story() -> None:
        with pytest.raises(IndilogError, match=r"storage-0 does not start: .*damaged"):
            async with supervised(config_in(tmp_path), left_out={ENGINE}):
                pass

    uvloop.run(story())
