"""BokiFlow decodes its own records unchanged, and ignores foreign or damaged ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bokiflow.runs.records import (
    CancelAsked,
    ChildEnded,
    ExecutorDead,
    ExecutorLeft,
    ExecutorRecord,
    Heartbeat,
    Origin,
    RecordedFailure,
    RunFinished,
    RunParked,
    RunRecord,
    RunStarted,
    RunTaken,
    Signalled,
    StepDecided,
    encode,
    executor_record,
    run_record,
)

texts = st.text(max_size=20)
epochs = st.integers(1, 2**40)
origins = st.none() | st.builds(Origin, texts, texts)
failures = st.none() | st.builds(RecordedFailure, texts, texts)
run_records = st.one_of(
    st.builds(RunStarted, texts, st.binary(), texts, texts, origins, origins),
    st.builds(RunTaken, epochs, texts),
    st.builds(StepDecided, epochs, texts, texts, texts, st.binary(), failures),
    st.builds(Signalled, texts, st.binary(), texts),
    st.builds(ChildEnded, texts),
    st.builds(CancelAsked),
    st.builds(RunParked, epochs, texts, texts),
    st.builds(RunFinished, epochs, st.binary(), failures, st.booleans()),
)
executor_records = st.one_of(
    st.builds(Heartbeat, texts, st.floats(0.001, 3600.0)),
    st.builds(ExecutorDead, texts, texts, st.integers(0, 2**63 - 1)),
    st.builds(ExecutorLeft, texts, st.booleans()),
)


@given(run_records)
def test_records_of_runs_read_back_as_they_were(record: RunRecord) -> None:
    assert run_record(encode(record)) == record
    assert executor_record(encode(record)) is None


@given(executor_records)
def test_records_of_executors_read_back_as_they_were(record: ExecutorRecord) -> None:
    assert executor_record(encode(record)) == record
    assert run_record(encode(record)) is None


@given(st.binary(max_size=64))
def test_bytes_of_other_formats_are_no_record(data: bytes) -> None:
    if not data.startswith(b"\xb0F"):
        assert run_record(data) is None
        assert executor_record(data) is None
