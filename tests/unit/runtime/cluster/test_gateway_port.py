"""A gateway configured with any port reuses its port within a run and publishes the number."""

from __future__ import annotations

from pathlib import Path

from indilog.base.ids import NodeId
from indilog.runtime.cluster.gateway_port import GatewayPort, free_port, keep_port, port_of

ENGINES = [NodeId("engine-0"), NodeId("engine-1")]
ANY = 0


def ports(directory: Path, configured: int) -> list[int]:
    return [port_of(directory, name, configured).port for name in ENGINES]


def test_the_port_of_an_engine_is_unknown_until_it_chose_one(tmp_path: Path) -> None:
    assert ports(tmp_path, ANY) == [0, 0]
    keep_port(tmp_path, ENGINES[0], 40_001)
    assert ports(tmp_path, ANY) == [40_001, 0]
    keep_port(tmp_path, ENGINES[1], 40_002)
    keep_port(tmp_path, ENGINES[1], 40_003)
    assert ports(tmp_path, ANY) == [40_001, 40_003]


def test_the_next_run_does_not_reuse_the_ports_of_this_one(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    keep_port(first, ENGINES[0], 40_001)
    assert ports(second, ANY) == [0, 0]


def test_engines_after_the_first_use_the_ports_after_the_configured_one(
    tmp_path: Path,
) -> None:
    for name in ENGINES:
        keep_port(tmp_path, name, 40_001)
    assert ports(tmp_path, 8080) == [8080, 8081]


def test_a_port_derived_from_the_configured_one_is_explained(tmp_path: Path) -> None:
    def words(name: NodeId, configured: int) -> str:
        return port_of(tmp_path, name, configured).words

    assert words(ENGINES[0], 8080) == ""
    assert words(ENGINES[1], 8080) == " (port + 1 for engine-1)"
    assert words(ENGINES[1], ANY) == "", "it may be any"
    keep_port(tmp_path, ENGINES[1], 40_001)
    assert port_of(tmp_path, ENGINES[1], ANY) == GatewayPort(
        40_001, " (chosen for engine-1 at its first start)", 1
    )


def test_the_port_of_an_engine_that_left_is_forgotten(tmp_path: Path) -> None:
    keep_port(tmp_path, ENGINES[1], 40_001)
    free_port(tmp_path, ENGINES[1])
    free_port(tmp_path, ENGINES[1])
    assert ports(tmp_path, ANY) == [0, 0]


def test_an_engine_added_after_others_left_has_the_port_of_its_number(tmp_path: Path) -> None:
    assert port_of(tmp_path, NodeId("engine-7"), 8080).port == 8087
