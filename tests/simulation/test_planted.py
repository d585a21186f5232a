"""The simulator catches planted bugs: a few of them here, all of them with `--planted`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.simulation.__main__ import Caught, caught_before, with_table
from tests.simulation.planted import BUGS, Bug, Planting
from tests.support.repeated import first_of

QUICK = {
    "a page of missed entries for a backup lacks one": 0,
    "the first answer of an index shard is taken for all": 0,
    "index data does not wake the watches of the newest record": 0,
    "the shell writes and does not sync": 4,
    "a sync does not reach the disk": 4,
}
"""Caught within a few seeds; each with one that takes little time and catches it, tried first."""


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_every_bug_has_its_place_in_the_code(bug: Bug) -> None:
    """After a change of the quoted source, plant the same mistake in the new source."""
    compile(bug.planted(), bug.file, "exec")


@pytest.mark.parametrize("name", first_of(QUICK, 3))
def test_a_planted_bug_is_caught(name: str) -> None:
    command = [
        sys.executable, "-m", "tests.simulation.planted", name,
        "--first", str(QUICK[name]), "--seeds", "20",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checks"]


def test_only_the_module_of_the_bug_is_changed() -> None:
    finder = Planting(BUGS[0])
    assert finder.find_spec("indilog_ordering.primary", None) is None


def test_the_table_of_caught_bugs_is_read_as_it_was_written() -> None:
    """An interrupted run of `--planted` continues from the table."""
    document = (
        "Before.\n\n| planted bug | in | caught by | at seed |\n|---|---|---|---|\n\nAfter.\n"
    )
    assert caught_before(document) == {}
    rows = {
        bug.name: Caught(bug.name, bug.file, "dense, unique", seed)
        for seed, bug in enumerate(reversed(BUGS[:3]))
    }
    written = with_table(document, rows)
    assert caught_before(written) == rows
    assert written.startswith("Before.\n\n| planted bug |")
    assert written.endswith(" 0 |\n\nAfter.\n"), "in the order of the bugs"
    assert with_table(written, {}) == document
