"""A gateway that takes any port takes the same one again in its run."""

from __future__ import annotations

from pathlib import Path

from indilog.ids import NodeId
from indilog.runtime.gateway_port import keep_port, port_chosen, words_for_port

ENGINES = [NodeId("engine-0"), NodeId("engine-1")]


def test_each_engine_has_the_port_that_it_chose_and_none_before(tmp_path: Path) -> None:
    assert [port_chosen(tmp_path, name) for name in ENGINES] == [0, 0]
    keep_port(tmp_path, ENGINES[0], 40_001)
    assert [port_chosen(tmp_path, name) for name in ENGINES] == [40_001, 0]
    keep_port(tmp_path, ENGINES[1], 40_002)
    keep_port(tmp_path, ENGINES[1], 40_003)
    assert [port_chosen(tmp_path, name) for name in ENGINES] == [40_001, 40_003]


def test_the_ports_of_a_run_are_not_those_of_the_next(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    keep_port(first, ENGINES[0], 40_001)
    assert port_chosen(second, ENGINES[0]) == 0


def test_only_a_port_that_is_a_sum_is_explained() -> None:
    engines = [NodeId("engine-0"), NodeId("engine-1")]
    assert words_for_port(8080, engines, engines[0]) == ""
    assert words_for_port(8080, engines, engines[1]) == " (port + 1 for engine-1)"
    assert words_for_port(0, engines, engines[1]) == "", "it may be any"
