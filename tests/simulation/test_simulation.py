"""Whole clusters under faults, seed by seed (A2, A9, A20); a seed gives the same run each time.

`python -m tests.simulation --seeds 10000` runs many more.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulation.run import Run

SEEDS = 6
GROUPS = 6
"""Tests that share the seeds, so that they run side by side."""


@pytest.mark.heavy
@pytest.mark.parametrize("group", range(GROUPS))
def test_every_history_keeps_the_guarantees_of_the_log(
    group: int, seeds_wanted: int | None
) -> None:
    for seed in range(group, seeds_wanted or SEEDS, GROUPS):
        report = Run(seed).run()
        assert not report.violations, report.describe()


def test_a_seed_replays_byte_identically_in_any_process() -> None:
    """A2: two processes with different hash seeds produce the same events, byte for byte."""
    digests = set()
    for hash_seed in ("1", "4711"):
        code = "from tests.simulation.run import Run; print([Run(s).run().digest for s in (4,)])"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": hash_seed}, capture_output=True, check=True,
        )  # fmt: skip
        digests.add(done.stdout)
    assert len(digests) == 1
    assert len(eval(digests.pop())) == 1


def test_another_seed_is_another_run() -> None:
    assert Run(3).run().digest != Run(4).run().digest


def test_a_failure_names_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator finds a broken guarantee: here backward reads find nothing."""
    from indilog_compute.local_log import LocalLog

    async def nothing(*_: object, **__: object) -> None:
        return None

    monkeypatch.setattr(LocalLog, "read_prev", nothing)
    reported = Run(0).run().describe()
    assert "seed 0: read_prev: " in reported
    assert "replay: python -m tests.simulation --seed 0" in reported
