"""The transition table of invocations: what any record can do to an invocation in any state."""

from __future__ import annotations

import itertools

import pytest

from indilog_compute.invocations.invocation_table import InvocationTable, TableLimits
from indilog_compute.invocations.records import (
    DeclaredDead,
    Event,
    Freed,
    InvocationAccepted,
    InvocationEnded,
    InvocationsClaimed,
)
from indilog_compute.invocations.states import (
    TRANSITIONS,
    InvocationChange,
    InvocationState,
    state_of,
)

RUNS, OTHER = "a#1", "b#1"
RECORDS: dict[InvocationChange, Event] = {
    InvocationChange.CLAIMED: InvocationsClaimed(OTHER, ("i",)),
    InvocationChange.FREED: Freed(RUNS, "i", is_lost=True),
    InvocationChange.EXECUTOR_DECLARED_DEAD: DeclaredDead(RUNS, 10**6, OTHER),
    InvocationChange.RETURNED: InvocationEnded(RUNS, "i", 0, b"1"),
    InvocationChange.FAILED: InvocationEnded(RUNS, "i", 0, None),
}


class Story:
    """One invocation, `i`, brought to a state by the shortest way."""

    def __init__(self, state: InvocationState | None) -> None:
        self.table = InvocationTable(TableLimits(5000.0, 9, 9, 1000, 1.0, 4.0))
        self.seqnums = itertools.count()
        way: dict[InvocationState | None, tuple[InvocationChange, ...]] = {
            InvocationState.SCHEDULED: (InvocationChange.DELAYED,),
            InvocationState.RUNNING: (InvocationChange.ACCEPTED,),
            InvocationState.DONE: (InvocationChange.ACCEPTED, InvocationChange.RETURNED),
            InvocationState.FAILED: (InvocationChange.ACCEPTED, InvocationChange.FAILED),
            None: (),
        }
        for change in way[state]:
            self.read(change)
        assert self.state is state

    @property
    def state(self) -> InvocationState | None:
        return state_of(self.table.get("i"))

    def read(self, change: InvocationChange) -> None:
        """Apply the record that says this."""
        time = 1000.0
        event: Event | None
        if change in (InvocationChange.ACCEPTED, InvocationChange.DELAYED):
            delay_s = 0.0 if change is InvocationChange.ACCEPTED else 5.0
            event = InvocationAccepted(
                id="i", executor=RUNS, function="app.f", arguments=b"", position=0, stream="s",
                delay_s=delay_s,
            )  # fmt: skip
        else:
            event = RECORDS[change]
            time = 2000.0 if change is InvocationChange.CLAIMED else time
        self.table.apply(next(self.seqnums), time, event)
        self.table.check_invariants()


@pytest.mark.parametrize("change", InvocationChange)
@pytest.mark.parametrize("state", [None, *InvocationState])
def test_the_fold_follows_the_table(
    state: InvocationState | None, change: InvocationChange
) -> None:
    """A record for which the table has no entry changes nothing."""
    story = Story(state)
    story.read(change)
    assert story.state is TRANSITIONS.get((state, change), state)


def test_an_outcome_counts_whether_its_executor_was_declared_dead_or_not() -> None:
    """The first outcome in the log counts, and the invocation never runs again."""
    story = Story(InvocationState.RUNNING)
    states = []
    for change in (
        InvocationChange.EXECUTOR_DECLARED_DEAD,
        InvocationChange.RETURNED,
        InvocationChange.CLAIMED,
    ):
        story.read(change)
        states.append(story.state)
    assert states == [InvocationState.SCHEDULED, InvocationState.DONE, InvocationState.DONE]


def test_an_ended_invocation_stays_ended() -> None:
    assert {state for state, _ in TRANSITIONS} == {
        None,
        InvocationState.SCHEDULED,
        InvocationState.RUNNING,
    }
