"""`indilog cluster scale` and `drain`: requests, progress, and what is said after the timeout."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner, Result

from indilog.cli.commands import app

MEMBERS = {
    "sequencers": ["sequencer-0"],
    "compute_nodes": ["engine-0"],
    "storage_nodes": ["storage-0", "storage-1", "storage-2"],
    "index_shards": [["index-0-0"], ["index-1-0"]],
    "aggregators": ["aggregator-0"],
}


class Platform:
    """A gateway that records requests, and answers with the next of its states."""

    url = "http://here"

    def __init__(self, *missing: list[str], gateway: str = "engine-0") -> None:
        self.requests: list[tuple[str, str, object]] = []
        self._states = [
            {"view": 4, "reached": not lacks, "missing": lacks, "wanted": MEMBERS,
             "installed": MEMBERS, "gateway": gateway}
            for lacks in missing
        ]  # fmt: skip

    def _answer(self) -> dict[str, Any]:
        return self._states.pop(0) if len(self._states) > 1 else self._states[0]

    def get(self, path: str) -> dict[str, Any]:
        self.requests.append(("GET", path, None))
        return self._answer()

    def put(self, path: str, *, json: object) -> dict[str, Any]:
        self.requests.append(("PUT", path, json))
        return self._answer()

    def post(self, path: str, *, json: object = None) -> dict[str, Any]:
        self.requests.append(("POST", path, json))
        return self._answer()

    def delete(self, path: str) -> dict[str, Any]:
        self.requests.append(("DELETE", path, None))
        return self._answer()


def run(monkeypatch: pytest.MonkeyPatch, platform: Platform, *arguments: str) -> Result:
    monkeypatch.setattr("indilog.cli.cluster_scale.Gateway", lambda _url: platform)
    monkeypatch.setattr("indilog.cli.cluster_scale._POLL_S", 0.001)
    return CliRunner().invoke(app, ["cluster", *arguments])


def test_scale_sends_only_what_was_given_and_shows_each_state_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joins = ["storage-2 has not joined yet."]
    platform = Platform(joins, joins, joins, [])
    shown = run(monkeypatch, platform, "scale", "--storage-nodes", "3", "--index-shards", "2")
    assert shown.exit_code == 0, shown.output
    path = "/cluster/members"
    counts = {"storage_nodes": 3, "index_shards": 2}
    assert platform.requests == [("PUT", path, counts), *[("GET", path, None)] * 3]
    assert [line.rstrip() for line in shown.stdout.splitlines()] == [
        "storage-2 has not joined yet.",
        "view           4",
        "sequencers     sequencer-0",
        "compute nodes  engine-0",
        "storage nodes  storage-0, storage-1, storage-2",
        "index nodes    index-0-0, index-1-0",
        "aggregators    aggregator-0",
    ]


def test_drain_names_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = Platform([])
    assert run(monkeypatch, platform, "drain", "storage-3").exit_code == 0
    assert run(monkeypatch, platform, "drain", "a/b").exit_code == 0
    paths = [path for _, path, _ in platform.requests]
    assert paths == ["/cluster/members/storage-3", "/cluster/members/a%2Fb"]


def test_without_waiting_the_wanted_nodes_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = Platform(["storage-2 has not joined yet."])
    shown = run(monkeypatch, platform, "scale", "--storage-nodes", "3", "--no-wait")
    assert shown.exit_code == 0
    assert len(platform.requests) == 1
    assert "4; these are wanted:" in shown.stdout


def test_a_command_does_not_wait_for_the_node_whose_gateway_it_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for arguments in (("drain", "engine-1"), ("scale", "--compute-nodes", "1")):
        platform = Platform(["engine-1 has not left yet."], gateway="engine-1")
        shown = run(monkeypatch, platform, *arguments)
        assert shown.exit_code == 0, shown.output
        assert "engine-1 runs the gateway at http://here" in shown.stdout
        assert "these are wanted" in shown.stdout
        assert len(platform.requests) == 1


def test_the_timeout_says_what_is_still_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = Platform(["storage-0 has not left yet: its shards are copied to other nodes."])
    shown = run(monkeypatch, platform, "drain", "storage-0", "--timeout", "0.05")
    assert shown.exit_code == 1
    assert "After 0.05 s" in shown.stderr
    assert "storage-0 has not left yet" in shown.stderr


def test_scale_without_a_number_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = Platform([])
    shown = run(monkeypatch, platform, "scale")
    assert (shown.exit_code, platform.requests) == (2, [])
    assert "--storage-nodes 4" in shown.stderr


def test_rebalance_waits_until_no_shard_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = ["Shards are moved to other storage nodes: their records are copied."]
    platform = Platform(moved, moved, [])
    shown = run(monkeypatch, platform, "rebalance")
    assert platform.requests[0] == ("POST", "/cluster/rebalance", None)
    assert shown.stdout.splitlines() == [
        *moved, "The replicas are spread evenly: `indilog cluster shards` shows them.",
    ]  # fmt: skip


def test_replace_asks_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = Platform([])
    assert run(monkeypatch, platform, "replace", "node-1").exit_code == 0
    assert platform.requests == [("POST", "/cluster/members/node-1/replace", None)]


@pytest.mark.parametrize(("options", "cuts"), [((), 10), (("--cuts", "0"), 0)])
def test_finalize_sends_the_grace_and_names_the_writers(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], cuts: int
) -> None:
    platform = Platform([])
    shards = {"0": {"writer": ""}, "1": {"writer": "engine-0"}}
    monkeypatch.setattr(platform, "get", {"/status": {"shards": shards}}.__getitem__)
    shown = run(monkeypatch, platform, "finalize", "0", *options)
    assert platform.requests == [("POST", "/cluster/shards/0/finalize", {"cuts": cuts})]
    assert shown.stdout.splitlines() == ["Shard 0 is finalized. Of the shards, engine-0 writes 1."]
