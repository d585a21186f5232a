"""For all orders and repetitions of a run's records: a reader of only its executor's records finds
the same owner as a reader of the run's records.

The model applies all records of the run (`bokiflow.runs.run_state`); the code under test sees only
those of one executor.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bokiflow.runs.records import RunFinished, RunParked, RunRecord, RunStarted, RunTaken
from bokiflow.runs.run_state import Run
from bokiflow.takeover.dead_executors import HeldRuns

EXECUTORS = ["a", "b"]
_executor = st.sampled_from(EXECUTORS)
_epoch = st.integers(1, 4)
_said = st.one_of(
    st.builds(lambda name: (RunStarted("w", b"{}", name, "v"), {name}), _executor),
    st.builds(
        lambda epoch, name, before: (RunTaken(epoch, name), {name, before}),
        st.integers(2, 5), _executor, _executor,
    ),
    st.builds(lambda epoch, name: (RunFinished(epoch, b"1"), {name}), _epoch, _executor),
    st.builds(lambda epoch, name: (RunParked(epoch, "v", "x"), {name}), _epoch, _executor),
    st.none(),
)  # fmt: skip
"""A record and whose streams have it; None: the run is forgotten, if it is over."""


def is_left(run: Run) -> bool:
    return run.started is not None and run.finished is None and run.parked is None


@given(st.lists(_said, max_size=14))
def test_a_run_is_listed_for_its_owner(said: list[tuple[RunRecord, set[str]] | None]) -> None:
    run = Run()
    held = {name: HeldRuns(name) for name in EXECUTORS}
    for seqnum, one in enumerate(said):
        if one is None:
            run = Run() if run.finished is not None else run
            continue
        record, streams = one
        run.apply(seqnum, 0.0, record)
        for name in streams:
            held[name].apply(seqnum, "r", record)
        if is_left(run):
            assert held[run.executor].runs == ["r"]


@given(st.integers(1, 5), st.sampled_from(["finished", "parked", "taken"]))
def test_records_applied_once_and_in_order_leave_no_run(epochs: int, end: str) -> None:
    """A process that stops in order therefore leaves no work for others."""
    held = HeldRuns("a")
    held.apply(0, "r", RunStarted("w", b"{}", "a", "v"))
    for epoch in range(2, epochs + 1):
        held.apply(epoch, "r", RunTaken(epoch, "a"))
    last: RunRecord = (
        RunFinished(epochs, b"1") if end == "finished" else RunParked(epochs, "v", "x")
    )
    held.apply(9, "r", RunTaken(epochs + 1, "b") if end == "taken" else last)
    assert held.runs == []
    assert held.drop("r") is None
