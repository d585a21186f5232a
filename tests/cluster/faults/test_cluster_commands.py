"""`indilog cluster` shows a lost storage node, the copy of its shard, and that all is well
again.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from indilog.cli.commands import app as command
from indilog.link.access import reach
from tests.cluster.faults.test_wiped_replica import DEADLINE_S
from tests.cluster.platform_process import platform
from tests.support.clients import command_clients_closed

RECORDS = 120
RECORD_BYTES = 1000


@pytest.fixture(autouse=True)
def _a_spare_that_copies_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("CLUSTER_STORAGE_NODES", "3"),
        ("CLUSTER_REPLICAS", "2"),
        ("CLUSTER_SEQUENCERS", "3"),
        ("CLUSTER_INDEX_SHARDS", "1"),
        ("CLUSTER_LOST_STORAGE_POLICY", "remove_replace"),
        ("NODE_STORAGE_LOST_S", "4"),
        ("NODE_HANG_S", "600"),
        ("NODE_PAGE_BYTES_MAX", "40000"),
        ("NODE_REPAIR_BYTES_PER_S", "6000"),
    ):
        monkeypatch.setenv(f"INDILOG_{name}", value)


def run(url: str, name: str) -> tuple[int, Any]:
    """Return the exit code and the data of a command. It runs in this process: the start of another
    one may take longer than the copy that is to be seen.
    """
    done = CliRunner().invoke(command, ["cluster", name, "--json", "--url", url])
    assert done.stdout, done.output
    return done.exit_code, json.loads(done.stdout)


def wait(url: str, name: str, holds: Callable[[Any], bool]) -> tuple[int, Any]:
    """Repeat a command until its data is as wanted; return its exit code and the data."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        code, found = run(url, name)
        if holds(found):
            return code, found
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def state_of(node: str, nodes: list[dict[str, Any]]) -> str:
    return str(next(row["state"] for row in nodes if row["node"] == node))


@pytest.mark.repeated("tests/unit/cli/test_cluster_status.py")
@pytest.mark.cluster
def test_a_lost_storage_node_is_shown_until_its_shard_is_copied_and_it_is_back(
    tmp_path: Path,
) -> None:
    """A34: what is given up is visible."""
    with platform(tmp_path / "data", "--processes") as running, command_clients_closed():
        url = running.url
        with httpx.Client(**reach(url).for_httpx, timeout=DEADLINE_S) as http:
            for _ in range(RECORDS):
                record = {"data": "x" * RECORD_BYTES, "tags": []}
                http.post("/logs/kept/records", json=record).raise_for_status()
        assert wait(url, "status", lambda found: found["healthy"])[0] == 0
        assert run(url, "views")[1]["spares"] == ["storage-2"]
        running.signal_node("storage-0", signal.SIGSTOP)

        _, nodes = wait(url, "nodes", lambda found: state_of("storage-0", found) == "lost")
        assert {node["state"] for node in nodes if node["node"] != "storage-0"} == {"running"}
        _, [shard] = wait(url, "shards", lambda found: bool(found[0]["missing"]))
        assert (shard["state"], shard["lost"]) == ("copying", [])
        assert sorted(shard["counting"]) == ["storage-1", "storage-2"]
        assert shard["further"] == ["storage-0"]
        assert 0 < shard["missing"]["storage-2"] <= RECORDS
        code, found = run(url, "status")
        assert (code, found["healthy"], found["needs_operator"]) == (1, False, [])
        assert found["lost_storage_nodes"] == ["storage-0"]
        assert found["shards"] == {"complete": 0, "copying": 1, "lost": 0}

        wait(url, "shards", lambda found: found[0]["state"] == "complete")
        assert run(url, "views")[1]["spares"] == ["storage-0"]
        assert run(url, "status")[0] == 1, "a spare that is lost can replace nothing"
        running.signal_node("storage-0", signal.SIGCONT)
        code, found = wait(url, "status", lambda found: found["healthy"])
        assert (code, found["lost_storage_nodes"]) == (0, [])
