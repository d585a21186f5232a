"""BokiFlow decodes its own records unchanged, and ignores foreign or damaged ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bokiflow.runs.records import (
    CancelAsked,
    ChildEnded,
    Claimed,
    CodeVersion,
    ExecutorLeft,
    ExecutorRecord,
    Heartbeat,
    LimitRecord,
    LimitReminded,
    LimitSettings,
    MoveAsked,
    OperationNoted,
    Origin,
    RecordedFailure,
    Released,
    RetryAsked,
    RunFinished,
    RunForgotten,
    RunKept,
    RunLimit,
    RunParked,
    RunRecord,
    RunStarted,
    RunTaken,
    RunWaits,
    Signalled,
    StepDecided,
    encode,
    ended_run_in,
    ended_tag,
    executor_record,
    limit_record,
    partition_of,
    partition_record,
    run_record,
    run_tag,
)
from indilog.base.ids import tag_columns
from indilog.base.log import Record

texts = st.text(max_size=20)
epochs = st.integers(1, 2**40)
origins = st.none() | st.builds(Origin, texts, texts, st.tuples() | st.tuples(texts, texts))
failures = st.none() | st.builds(RecordedFailure, texts, texts)
counts = st.integers(0, 2**40)
times = st.floats(0, 1e12)
seqnums = st.integers(0, 2**63 - 1)
some = st.none() | st.integers(1, 10_000)
settings = st.builds(LimitSettings, some, some, some, st.floats(0.001, 1e8))
limits = st.none() | st.builds(
    RunLimit, texts, settings, texts, st.integers(-1_000_000, 1_000_000), st.booleans()
)
run_records = st.one_of(
    st.builds(RunStarted, texts, st.binary(), texts, texts, origins, origins, limits),
    st.builds(RunTaken, epochs, texts),
    st.builds(
        StepDecided, epochs, texts, texts, texts, st.binary(), failures, counts, st.none() | counts
    ),
    st.builds(
        OperationNoted, epochs, texts, texts, texts, times, counts, st.none() | texts,
        st.none() | times,
    ),
    st.builds(Signalled, texts, st.binary(), texts),
    st.builds(ChildEnded, texts),
    st.builds(CancelAsked),
    st.builds(RetryAsked),
    st.builds(MoveAsked, st.builds(CodeVersion, epochs, texts)),
    st.builds(RunParked, epochs, texts, texts),
    st.builds(RunWaits, epochs, st.none() | times, texts, seqnums),
    st.builds(RunFinished, epochs, st.binary(), failures, st.booleans()),
)  # fmt: skip
partitions = st.lists(st.integers(0, 1023), max_size=70).map(tuple)
executor_records = st.one_of(
    st.builds(
        Heartbeat, texts, st.floats(0.001, 3600.0), st.booleans(), st.booleans(),
        st.integers(1, 1024), st.binary(max_size=128), seqnums,
    ),
    st.builds(Claimed, texts, partitions, seqnums),
    st.builds(Released, texts, partitions),
    st.builds(ExecutorLeft, texts, partitions),
)  # fmt: skip


@given(run_records)
def test_records_of_runs_read_back_as_they_were(record: RunRecord) -> None:
    assert run_record(encode(record)) == record
    assert executor_record(encode(record)) is None


@given(run_records | st.builds(LimitReminded, st.none() | settings))
def test_records_of_limits_read_back_as_they_were(record: LimitRecord) -> None:
    assert limit_record(encode(record)) == record


@given(st.builds(RunForgotten, texts, seqnums))
def test_records_of_partitions_read_back_as_they_were(record: RunForgotten) -> None:
    assert partition_record(encode(record)) == record
    assert run_record(encode(record)) is None


@given(texts)
def test_a_run_that_is_listed_again_is_named_by_its_record(run: str) -> None:
    def listed(data: bytes, *tags: str) -> Record:
        return Record(0, tag_columns("shop/flow", tags).names, data, 0.0, 0.0)

    data = encode(RunKept(run))
    assert ended_run_in(listed(data, ended_tag(0))) == run
    assert ended_run_in(listed(b"", ended_tag(0), run_tag("r"))) == "r"
    assert ended_run_in(listed(b"x", ended_tag(0))) is None
    assert partition_record(data) is run_record(data) is None


@given(texts, st.integers(1, 1024), st.lists(st.integers(1, 99), max_size=3))
def test_a_child_lies_in_the_partition_of_its_parent(run: str, count: int, path: list[int]) -> None:
    child = f"{run}@7/" + "/".join(map(str, path))
    assert partition_of(child, count) == partition_of(run, count)
    assert 0 <= partition_of(run, count) < count


@given(executor_records)
def test_records_of_executors_read_back_as_they_were(record: ExecutorRecord) -> None:
    assert executor_record(encode(record)) == record
    assert run_record(encode(record)) is None


@given(st.binary(max_size=64))
def test_bytes_of_other_formats_are_no_record(data: bytes) -> None:
    if not data.startswith(b"\xb0F"):
        assert run_record(data) is None
        assert executor_record(data) is None
