"""`indilog cluster status`, `nodes`, `shards` and `views`, from the status of a platform."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from indilog.cli.commands import app

STORAGE = ("storage-0", "storage-1", "storage-2")
SEQUENCERS = ("sequencer-0", "sequencer-1", "sequencer-2")
INDEX = ("index-0-0", "index-1-0")


class Platform:
    """A platform with a status that tests change."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, Any]] = {
            **{node: {"committed": 70, "learner": 0, "term": 3} for node in SEQUENCERS},
            **{node: {"position": 70, "records": 1500, "bytes": 9000} for node in STORAGE},
            **{node: {"position": 69} for node in INDEX},
            "aggregator-0": {"pending": 0},
        }
        self.nodes["sequencer-1"] |= {"tail": 1500, "lost_storage_nodes": []}
        self.shard = {
            "writer": "engine-0",
            "replicas": ["storage-0", "storage-1"],
            "counting": ["storage-0", "storage-1"],
            "finalized": False,
        }
        self.status: dict[str, Any] = {
            "release": "0.1.0",
            "ready": True,
            "read_only": False,
            "lost_records": 0,
            "view": 2,
            "shards": {"0": self.shard},
            "layout": {
                "sequencers": [*SEQUENCERS],
                "storage_nodes": [*STORAGE],
                "index_shards": {str(number): [node] for number, node in enumerate(INDEX)},
                "index_eras": [{"start": 0, "shards": [0]}, {"start": 1200, "shards": [0, 1]}],
                "aggregators": ["aggregator-0"],
                "engines": ["engine-0"],
                "zones": {},
                "lost_storage_policy": "finalize_add",
            },
            "nodes": self.nodes,
            "elsewhere": [*SEQUENCERS, *STORAGE, *INDEX, "aggregator-0"],
            "silent": [],
            "engine": {"progress": {"position": 68}},
        }

    def silence(self, *nodes: str) -> None:
        """Let these nodes publish no status."""
        for node in nodes:
            del self.nodes[node]
            self.status["silent"].append(node)

    def lose(self, *nodes: str) -> None:
        """Let the primary get no heartbeat of these storage nodes."""
        self.nodes["sequencer-1"]["lost_storage_nodes"] += nodes

    def copy(self, missing: int) -> None:
        """Let storage-2 count in place of storage-0, without so many records."""
        counting = ["storage-1", "storage-2"]
        self.shard |= {"replicas": [*counting, "storage-0"], "counting": counting}
        self.nodes["storage-2"]["missing_by_shard"] = {"0": missing} if missing else {}


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Platform:
    made = Platform()
    paths = {"/status": made.status}
    gateway = SimpleNamespace(get_with=lambda _field, path: paths[path])
    monkeypatch.setattr("indilog.cli.cluster.Gateway", lambda _url: gateway)
    return made


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["cluster", *arguments])


def row_of(name: str, shown: Result) -> str:
    """Return the row that begins with `name`, with one space between its cells."""
    rows = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    [row] = [row for row in rows if row.startswith(f"{name} ")]
    return row


def test_logs_that_are_being_copied_are_named(platform: Platform) -> None:
    platform.status["filling"] = {"orders": ["storage-1", "storage-2"]}
    shown = run("status")
    assert shown.exit_code == 1
    assert "Log orders is being copied to storage-1, storage-2." in shown.stdout


def test_logs_that_cannot_be_used_are_named(platform: Platform) -> None:
    platform.status["failing"] = {"orders": "The object store has no orders-1/LOG."}
    shown = run("status")
    assert shown.exit_code == 1
    wanted = "Needs the operator: Log orders cannot be used: The object store has no orders-1/LOG."
    assert wanted in shown.stdout
    platform.lose("storage-2")
    assert "Heals by itself: Log orders cannot be used" in run("status").stdout


def test_a_healthy_cluster_is_one_screen_that_ends_so(platform: Platform) -> None:
    shown = run("status")
    assert shown.exit_code == 0, platform
    assert shown.stdout.splitlines() == [
        "primary        sequencer-1, term 3",
        "sequencers     3 of 3 count; a majority (2)",
        "storage nodes  3 of 3 up",
        "shards         1 complete, 0 being copied, 0 with a lost replica",
        "policy         finalize_add, if appends wait for a lost storage node",
        "index nodes    2 of 2 up",
        "aggregators    1 of 1 up",
        "compute nodes  1 of 1 up",
        "lost records   0",
        "read-only      no",
        "release        0.1.0",
        "healthy",
    ]


def test_two_releases_are_both_shown(platform: Platform) -> None:
    for node in (*SEQUENCERS, "storage-0"):
        platform.nodes[node]["release"] = "0.1.1"
    shown = run("status")
    assert row_of("release", shown) == "release 0.1.0, 0.1.1"
    assert shown.exit_code == 0
    assert json.loads(run("status", "--json").stdout)["releases"] == ["0.1.0", "0.1.1"]
    assert row_of("storage-0", run("nodes")).endswith(" 0.1.1")
    assert row_of("engine-0", run("nodes")).endswith(" 0.1.0")


def test_of_two_primaries_the_one_of_the_newest_term_is_named(platform: Platform) -> None:
    platform.nodes["sequencer-0"] |= {"tail": 1400, "term": 2, "lost_storage_nodes": [*STORAGE]}
    assert row_of("primary", run("status")) == "primary sequencer-1, term 3"
    assert run("status").exit_code == 0, "what the earlier one regards as lost does not matter"


def test_a_missing_primary_is_replaced_without_the_operator(platform: Platform) -> None:
    platform.silence("sequencer-1")
    shown = run("status")
    assert shown.exit_code == 1
    assert row_of("primary", shown) == "primary none"
    assert "2 of 3 count; a majority (2)" in shown.stdout
    *_, first, last = shown.stdout.splitlines()
    assert first == "Heals by itself: There is no primary: a sequencer takes over."
    assert last.startswith("Heals by itself: No heartbeat of sequencer-1:")


def test_without_a_majority_of_sequencers_the_operator_is_needed(platform: Platform) -> None:
    platform.silence("sequencer-0")
    platform.nodes["sequencer-2"]["learner"] = 1
    shown = run("status")
    assert shown.exit_code == 1
    assert "1 of 3 count; no majority (2)" in shown.stdout
    assert shown.stdout.splitlines()[-1] == (
        "Needs the operator: Only 1 of 3 sequencers count, and appends need 2: bring the others "
        "back, with their disks, unless the supervisor does."
    )


def test_a_learner_among_a_majority_heals_by_itself(platform: Platform) -> None:
    platform.nodes["sequencer-2"]["learner"] = 1
    shown = run("status")
    assert shown.exit_code == 1
    assert shown.stdout.splitlines()[-1] == (
        "Heals by itself: sequencer-2 fetches the metalog entries that it lacks."
    )


def test_a_lost_replica_heals_by_itself_if_there_is_a_spare(platform: Platform) -> None:
    platform.lose("storage-0")
    shown = run("status")
    assert shown.exit_code == 1
    assert "2 of 3 up; lost: storage-0" in shown.stdout
    assert "0 complete, 0 being copied, 1 with a lost replica" in shown.stdout
    assert shown.stdout.splitlines()[-1] == (
        "Heals by itself: Shard 0 has lost storage-0: it gets another replica, and if appends "
        "wait, its compute node gets a new shard."
    )
    row = row_of("storage-0", run("nodes"))
    assert row == "storage-0 storage lost 70 - 1,500 9,000 -", "its process still runs"


@pytest.mark.parametrize("cause", ["the spare is lost", "one sequencer"])
def test_a_lost_replica_that_nothing_replaces_needs_the_operator(
    platform: Platform, cause: str
) -> None:
    platform.lose("storage-0")
    if cause == "one sequencer":
        platform.status["layout"]["sequencers"] = ["sequencer-1"]
    else:
        platform.silence("storage-2")
    shown = run("status")
    assert shown.exit_code == 1
    assert shown.stdout.splitlines()[-1] == (
        "Needs the operator: Shard 0 has lost storage-0, and no spare can replace it: bring it "
        "back, with its disk, unless the supervisor does."
    )


def test_a_node_that_has_an_earlier_copy_of_a_shard_can_replace_a_lost_one(
    platform: Platform,
) -> None:
    platform.copy(12)
    platform.lose("storage-2")
    assert "it gets another replica" in run("status").stdout.splitlines()[-1]


def test_a_shard_that_is_copied_shows_what_is_missing_where(platform: Platform) -> None:
    platform.copy(1234)
    platform.lose("storage-0")
    shown = run("status")
    assert shown.exit_code == 1
    assert "0 complete, 1 being copied, 0 with a lost replica" in shown.stdout
    assert "Shard 0 is being copied; 1,234 records are missing." in shown.stdout
    row = "0 engine-0 copying storage-1 storage-2 storage-0 storage-2 1,234"
    assert row_of("0", run("shards")) == row
    [shard] = json.loads(run("shards", "--json").stdout)
    assert shard == {
        "shard": 0,
        "writer": "engine-0",
        "state": "copying",
        "counting": ["storage-1", "storage-2"],
        "further": ["storage-0"],
        "missing": {"storage-2": 1234},
        "lost": [],
        "zones": [],
        "shares_zone": False,
        "finalized": False,
    }


def test_a_shard_counts_as_copied_until_the_lost_node_is_dropped(platform: Platform) -> None:
    platform.copy(0)
    assert run("status").stdout.splitlines()[-1] == "Heals by itself: Shard 0 is being copied."
    platform.shard["replicas"] = platform.shard["counting"]
    assert run("status").exit_code == 0


def test_a_replica_that_repairs_its_disk_is_being_copied(platform: Platform) -> None:
    platform.nodes["storage-1"]["missing_by_shard"] = {"0": 7}
    assert "Shard 0 is being copied; 7 records are missing." in run("status").stdout


def test_a_silent_node_is_named_and_has_no_figures(platform: Platform) -> None:
    platform.silence("index-1-0")
    shown = run("status")
    assert shown.exit_code == 1
    assert "1 of 2 up; silent: index-1-0" in shown.stdout
    assert shown.stdout.splitlines()[-1] == (
        "Heals by itself: No heartbeat of index-1-0: the supervisor, or systemd, restarts a "
        "process that ended or hangs."
    )
    nodes = run("nodes")
    assert row_of("index-1-0", nodes) == "index-1-0 index silent - - - - -"
    assert row_of("index-0-0", nodes) == "index-0-0 index running 69 - - - -"


def test_nodes_have_their_roles_terms_and_figures(platform: Platform) -> None:
    shown = run("nodes")
    assert shown.exit_code == 0, platform
    assert row_of("sequencer-1", shown) == "sequencer-1 primary running 70 3 - - -"
    assert row_of("sequencer-2", shown) == "sequencer-2 sequencer running 70 3 - - -"
    assert row_of("storage-2", shown) == "storage-2 storage running 70 - 1,500 9,000 -"
    assert row_of("engine-0", shown) == "engine-0 compute running 68 - - - 0.1.0"
    names = [node["node"] for node in json.loads(run("nodes", "--json").stdout)]
    assert names == [*SEQUENCERS, *STORAGE, *INDEX, "aggregator-0", "engine-0"]


@pytest.mark.parametrize(
    ("figure", "value", "last"),
    [
        ("read_only", True, "A disk is full"),
        ("lost_records", 1200, "1,200 records are lost permanently"),
        ("ready", False, "engine-0 has failed"),
    ],
)
def test_what_the_platform_cannot_repair_needs_the_operator(
    platform: Platform, figure: str, value: object, last: str
) -> None:
    platform.status[figure] = value
    shown = run("status")
    assert shown.exit_code == 1
    assert shown.stdout.splitlines()[-1].startswith(f"Needs the operator: {last}")


def test_a_programs_summary_has_the_verdict(platform: Platform) -> None:
    platform.lose("storage-0")
    shown = run("status", "--json")
    assert shown.exit_code == 1
    found = json.loads(shown.stdout)
    assert (found["healthy"], found["needs_operator"]) == (False, [])
    assert (found["primary"], found["term"], found["majority"]) == ("sequencer-1", 3, 2)
    assert found["shards"] == {"complete": 0, "copying": 0, "lost": 1}
    assert found["lost_storage_nodes"] == ["storage-0"]


def test_views_shows_the_one_view_its_eras_and_the_spares(platform: Platform) -> None:
    shown = run("views")
    assert shown.exit_code == 0
    assert "2; there is one view at a time" in shown.stdout
    assert "spares now     storage-2\n" in shown.stdout
    assert "index era 1    positions from 1,200: 0, 1\n" in shown.stdout
    platform.shard["replicas"] = platform.shard["counting"] = ["storage-1", "storage-2"]
    assert json.loads(run("views", "--json").stdout)["spares"] == ["storage-0"]


def test_shards_have_the_zones_of_their_replicas_and_an_audit(platform: Platform) -> None:
    zones = platform.status["layout"]["zones"]
    zones |= {"storage-0": "east", "storage-1": "west", "storage-2": "west"}
    shown = run("shards")
    assert row_of("0", shown) == "0 engine-0 complete storage-0 storage-1 - - east, west"
    assert "There" not in shown.stdout
    assert "are in" not in shown.stdout
    zones["storage-0"] = "west"
    assert "are in" not in run("shards").stdout, "there is one zone only"
    zones["storage-2"] = "east"
    shown = run("shards")
    assert shown.stdout.splitlines()[-1] == (
        "The replicas of shard 0 are in zone west (2), and there are storage nodes in other zones."
    )
    [shard] = json.loads(run("shards", "--json").stdout)
    assert (shard["zones"], shard["shares_zone"]) == (["west", "west"], True)
    assert row_of("storage-2", run("nodes")).endswith(" east")
