"""The roles do what the scenario files say, message by message."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.scenarios.scenario import Scenario, ScenarioError

FILES = sorted(Path(__file__).parent.glob("*.txt"))
CLUSTER = "cluster\n----\n\n"


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_the_roles_do_what_the_scenario_shows(path: Path, *, rewrite: bool) -> None:
    shown = path.read_text()
    done = Scenario(path.name, shown).run()
    if rewrite:
        path.write_text(done)
    elif done != shown:
        changes = difflib.unified_diff(
            shown.splitlines(), done.splitlines(), path.name, "what the roles do now", lineterm=""
        )
        pytest.fail(
            "\n".join(changes) + "\n\nIf this is what the roles should do, run\n"
            "    pytest tests/scenarios --rewrite\nand read the diff of the files.",
            pytrace=False,
        )


def test_there_are_scenarios_and_each_begins_with_what_it_shows() -> None:
    assert len(FILES) >= 12
    assert [path.name for path in FILES if not path.read_text().startswith("# ")] == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("append engine-0 orders x\n----\n", "x.txt:1: the first command is cluster"),
        (f"{CLUSTER}frobnicate\n----\n", "x.txt:4: no command frobnicate; there are cluster"),
        (f"# a\n{CLUSTER}settle\n", "x.txt:6: ---- follows a command"),
        (f"{CLUSTER}settle quite\n----\n", "x.txt:4: no word quite here; there is quiet"),
        (f"{CLUSTER}read engine-0 orders\n----\n", "x.txt:4: the form is: read ENGINE LOG TAG"),
        (f"{CLUSTER}crash storage-7\n----\n", "x.txt:4: no node storage-7; there are sequencer-0"),
        (f"{CLUSTER}crash storage-0 unsyncd=lost\n----\n", "x.txt:4: no option unsyncd"),
        (f"{CLUSTER}append storage-0 orders x\n----\n", "x.txt:4: storage-0 is no engine"),
        (f"{CLUSTER}wait long\n----\n", "x.txt:4: could not convert string to float"),
        (f"{CLUSTER}start storage-0\n----\n", "x.txt:4: storage-0 is up already"),
        (f"{CLUSTER}damage storage-0 RECORDS\n----\n", "x.txt:4: storage-0 has no RECORDS frame"),
        ("cluster replicas=2\n----\n", "x.txt:1: 2 replicas need as many storage nodes"),
        ("cluster resend=1\n----\n", "x.txt:1: .*unexpected keyword argument 'resend'"),
    ],
)
def test_a_command_that_cannot_be_followed_names_its_line(text: str, error: str) -> None:
    with pytest.raises(ScenarioError, match=f"^{error}"):
        Scenario("x.txt", text).run()


def test_running_a_file_twice_changes_nothing() -> None:
    once = Scenario("x.txt", f"{CLUSTER}append engine-0 orders x\n----\n\nsettle\n----\n").run()
    assert Scenario("x.txt", once).run() == once
    assert "  append 1 succeeds: seqnum 0\n" in once
