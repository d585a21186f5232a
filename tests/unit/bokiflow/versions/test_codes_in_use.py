"""The state of a partition counts the open runs of each deployment."""

from __future__ import annotations

import msgspec

from bokiflow.ownership.partition_state import PartitionState
from bokiflow.runs.records import (
    CodeVersion,
    RunContinued,
    RunFinished,
    RunRecord,
    RunStarted,
    RunTaken,
    encode,
    partition_tag,
    run_tag,
)
from bokiflow.runs.run_state import RunState
from indilog import Record
from indilog.base.ids import tag_columns

ONE, TWO = CodeVersion(1, "a" * 16), CodeVersion(2, "b" * 16)


def started(code: CodeVersion | None) -> RunStarted:
    return RunStarted("order", b"{}", "e1", "v", code=code)


def continued(code: CodeVersion | None) -> RunContinued:
    return RunContinued(
        epoch=2,
        round=2,
        end=5,
        workflow="order",
        arguments=b"{}",
        executor="e1",
        version="v",
        started_at=0,
        began=0.0,
        cancel_asked=False,
        code=code,
    )


class Story:
    """Applies records to a partition, and to each run."""

    def __init__(self) -> None:
        self.state = PartitionState()
        self.runs: dict[str, RunState] = {}
        self._seqnum = 0

    def say(self, id_: str, said: RunRecord) -> dict[int, int]:
        """Return the number of open runs of each version after a record."""
        now = 100.0 + self._seqnum
        tags = (run_tag(id_), partition_tag(0))
        names = tag_columns("shop/flow", tags).names
        record = Record(self._seqnum, names, encode(said), now, now)
        self._seqnum += 1
        self.state.apply(record)
        self.runs.setdefault(id_, RunState()).apply(record.seqnum, now, said)
        for one, run in self.state.runs.items():
            assert run.code == self.runs[one].code
        again = PartitionState.restore(msgspec.msgpack.encode(self.state.snapshot()))
        assert again.codes == self.state.codes, "a checkpoint has the same counts"
        return {code.version: count for code, count in self.state.codes.items()}


def test_open_runs_are_counted_by_the_code_with_which_they_continue() -> None:
    story = Story()
    assert story.say("a", started(ONE)) == {1: 1}
    assert story.say("b", started(ONE)) == {1: 2}
    assert story.say("b", started(TWO)) == {1: 2}, "a repeated start has no effect"
    assert story.say("c", started(None)) == {1: 2}
    assert story.say("a", RunTaken(2, "e2")) == {1: 2}, "it keeps its code"
    assert story.say("b", RunTaken(3, "e2", 0, TWO)) == {1: 2}, "it is of another epoch"
    assert story.say("b", RunTaken(2, "e2", 0, TWO)) == {1: 1, 2: 1}
    assert story.say("a", continued(TWO)) == {2: 2}
    assert story.say("a", RunFinished(3, b"1")) == {2: 1}
    assert story.say("b", RunFinished(2, b"1")) == {}


def test_a_run_says_when_it_moved() -> None:
    story = Story()
    story.say("a", started(ONE))
    story.say("b", started(None))
    story.say("a", RunTaken(2, "e2", 0, TWO))
    story.say("b", RunTaken(2, "e2", 0, TWO))
    moved, known = story.runs["a"], story.runs["b"]
    assert (moved.code, moved.moved) == (TWO, 102.0)
    assert (known.code, known.moved) == (TWO, None), "its code was not known before"
    story.say("a", continued(TWO))
    assert (moved.code, moved.moved) == (TWO, None), "its round began with it"
