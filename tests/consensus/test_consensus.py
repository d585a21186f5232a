"""The consensus core keeps its guarantees in all states near some situations, and in random walks
far from them. Planted bugs show that the checks can fail.

The claims are those of `indilog_ordering.consensus`. One entry is committed at a position, it is on
the disks of a majority, and every later primary adopts it. Copies match (Raft 5.3). No tail is
below an entry that was committed before the tail was asked for.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.consensus.explorer import (
    BUDGETS,
    CHANGE_BUDGETS,
    HISTORIES,
    NOTHING,
    SIZES,
    changes,
    explore,
    happened,
    situations,
    walk,
)
from tests.consensus.world import Left
from tests.simulation.planted import BUGS

STATES_MAX = 800
NAMES = [name for name, _ in situations(NOTHING)]
QUICK = "entries of earlier terms are committed without one of the own term"


@pytest.mark.parametrize(("left", "depth"), BUDGETS)
@pytest.mark.parametrize("name", NAMES)
def test_no_order_of_steps_breaks_a_guarantee(name: str, left: Left, depth: int) -> None:
    state = dict(situations(left))[name]
    explored = explore(state, depth, STATES_MAX)
    assert explored.found is None, "\n".join((*explored.found.steps, explored.found.what))


@pytest.mark.parametrize(("left", "depth"), CHANGE_BUDGETS)
@pytest.mark.parametrize("name", [name for name, _ in changes(NOTHING)])
def test_no_order_of_changes_breaks_a_guarantee(name: str, left: Left, depth: int) -> None:
    state = dict(changes(left))[name]
    explored = explore(state, depth, STATES_MAX)
    assert explored.found is None, "\n".join((*explored.found.steps, explored.found.what))


@pytest.mark.parametrize("name", HISTORIES)
def test_no_history_breaks_a_guarantee(name: str) -> None:
    found = happened(name).found
    assert found is None, found.what


@given(seed=st.integers(0, 2**32), size=st.sampled_from(SIZES))
def test_no_random_walk_breaks_a_guarantee(seed: int, size: tuple[int, int]) -> None:
    """At a time, any two of five sequencers may be wiped, or any one of three."""
    explored = walk(seed, nodes=size[0], spares=size[1])
    assert explored.found is None, "\n".join((*explored.found.steps, explored.found.what))


def test_a_planted_bug_is_caught() -> None:
    assert any(bug.name == QUICK for bug in BUGS)
    command = [sys.executable, "-m", "tests.simulation.planted", QUICK]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checks"] == ["consensus"]
