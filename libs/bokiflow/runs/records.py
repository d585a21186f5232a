"""BokiFlow's records: events of runs, and of the executors that own partitions of runs.

All records of a run have the tag `flow:<id>`, so the sub-stream of this tag is the whole history of
the run. Each run lies in a partition (`partition_of`). Records that begin, end or wake a run also
have the tag of its partition, `flow-p:<n>`. So the sub-stream of that tag shows which runs of the
partition are open.

Records that an owner must handle at once also have the tag `flow-in` of the inbox. A start that
names its executor lacks this tag, because that executor handles the start itself.

`execution`, `runner`, `taking`, `handle` and `ownership` append these records. `run_state`,
`partition_state`, `limit_state` and `owners` derive states from them. `indilog.sdk.record_format`
defines the frame of a record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from bokiflow.runs.errors import FlowSettingsError, FlowVersionError
from indilog import Record
from indilog.sdk import TAG_BYTES_MAX, RecordFormat, SeqNum, can_be_in_tag

VERSION: Final = 3
_MAGIC: Final = b"\xb0F"
_FORMAT: Final = RecordFormat(_MAGIC, VERSION, of="BokiFlow", error=FlowVersionError)
RUNS_TAG: Final = "flows"
"""Tag of the start of each run."""
_ENDS_PREFIX: Final = "flows-"
LATE_TAG: Final = f"{_ENDS_PREFIX}late"
"""Tag of the ends of runs that are so old that their starts may be trimmed from the list of starts.
"""
EXECUTORS_TAG: Final = "flow-executors"
INBOX_TAG: Final = "flow-in"
"""Tag of records that the owner of a partition handles at once."""
RUN_PREFIX: Final = "flow:"
_PARTITION_PREFIX: Final = "flow-p:"
_ENDED_PREFIX: Final = "flow-ended:"
_SCHEDULE_PREFIX: Final = "flow-schedule:"
_LIMIT_PREFIX: Final = "flow-limit:"
ID_BYTES_MAX: Final = 242
LEASE_S_MAX: Final = 3600.0
PARTITIONS: Final = 64
"""Default for the number of partitions of a flow."""
PARTITIONS_MAX: Final = 1024
assert len(RUN_PREFIX) + ID_BYTES_MAX <= TAG_BYTES_MAX

_RecordT = TypeVar("_RecordT")
_SeqNum = Annotated[SeqNum, msgspec.Meta(ge=0)]
_Epoch = Annotated[int, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=1)]
_IntervalS = Annotated[float, msgspec.Meta(gt=0)]
_Partitions = tuple[Annotated[int, msgspec.Meta(ge=0, lt=PARTITIONS_MAX)], ...]


class RecordedFailure(msgspec.Struct, frozen=True, array_like=True):
    """A recorded error: the name of its class, and its message."""

    kind: str
    message: str


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """The step of another run that started this run, or from which this run was forked.

    Attributes:
        run: id of the other run.
        step: number of the step.
        awaited_by: ids of the runs that cannot end before this run has ended: the other run, and
            the runs that wait for the other run. Empty: the other run may end first.
    """

    run: str
    step: str
    awaited_by: tuple[str, ...] = ()


class CodeVersion(msgspec.Struct, frozen=True, array_like=True):
    """A deployment of an application.

    Attributes:
        version: its number; it grows with each deployment of the application.
        digest: a digest of the sources; deployments of the same sources have the same digest.
    """

    version: Annotated[int, msgspec.Meta(ge=1)]
    digest: str


class LimitSettings(msgspec.Struct, frozen=True, array_like=True):
    """How many runs of a limit may execute at a time, and how many may begin in an interval.

    Attributes:
        concurrency: largest number of runs with one key that execute at a time; None: no limit.
        total: largest number of runs of all keys together that execute at a time; None: no limit.
        starts: largest number of runs with one key that begin in an interval; None: no limit.
        interval_s: length of the interval of `starts` in seconds.
    """

    concurrency: _Count | None = None
    total: _Count | None = None
    starts: _Count | None = None
    interval_s: _IntervalS = 1.0


class RunLimit(msgspec.Struct, frozen=True, array_like=True):
    """The limit that a run waits for (`bokiflow.limits`).

    Attributes:
        name: name of the limit, unique in the flow.
        settings: its settings. The settings in the newest record apply to all runs of the limit.
        key: the key of the run; empty: the limit has no keys.
        priority: of the runs with one key, those with a larger number begin first.
        skips: whether the run ends at once if it cannot begin at once.
    """

    name: str
    settings: LimitSettings
    key: str = ""
    priority: int = 0
    skips: bool = False


class RunStarted(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """A run starts. Only the first such record of a run takes effect.

    `executor` executes the run in epoch 1. If `executor` is empty, the owner of the run's partition
    takes the run. `arguments` is a JSON object. `version` is a digest of the code. `parent` is the
    step that started the run. `forked` is the step of another run from which this run continues. A
    run with a `limit` executes only when it has its turn. `code` is the deployment that started the
    run.
    """

    workflow: str
    arguments: bytes
    executor: str
    version: str
    parent: Origin | None = None
    forked: Origin | None = None
    limit: RunLimit | None = None
    code: CodeVersion | None = None


class RunTaken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """`executor` executes the run in `epoch`. The record takes effect if the run's epoch is one
    less.

    `crashes` counts the executors in a row that crashed right after they got the run
    (`bokiflow.ownership.crash_loops`). From here on, the run continues with the code of the
    deployment `code`; None: with the same code as before.
    """

    epoch: _Epoch
    executor: str
    crashes: Annotated[int, msgspec.Meta(ge=0)] = 0
    code: CodeVersion | None = None


class StepDecided(msgspec.Struct, frozen=True, array_like=True, tag="decided"):
    """A step has this outcome: `result` as JSON text, or `failure`.

    The record takes effect if `epoch` is the current one and no earlier record decides this step
    number.

    Attributes:
        attempts: number of attempts in this epoch; 0: not recorded.
        duration_ms: milliseconds that the step took in this epoch; None: not recorded.
        nth: number of decisions of the round up to this one; 0: the executor did not know it.
        status_at: seqnum of the last decision before this one that set the status; -1: there is
            none.
    """

    epoch: _Epoch
    number: str
    name: str
    kind: str
    result: bytes
    failure: RecordedFailure | None = None
    attempts: Annotated[int, msgspec.Meta(ge=0)] = 0
    duration_ms: Annotated[int, msgspec.Meta(ge=0)] | None = None
    nth: Annotated[int, msgspec.Meta(ge=0)] = 0
    status_at: Annotated[SeqNum, msgspec.Meta(ge=-1)] = -1


CODE: Final = "code"
"""Number, name and kind of a note which says that a run waits for its code."""


class OperationNoted(msgspec.Struct, frozen=True, array_like=True, tag="noted"):
    """An operation has begun and takes long. The note decides nothing. It takes effect if `epoch`
    is the current one and the operation is not decided. A note with the number `CODE` says that the
    run waits for its code.

    Attributes:
        since: when the operation began. Times are seconds since 1970, by the time of the log.
        failed: number of failed attempts so far.
        error: the error of the last failed attempt.
        next_at: when the next attempt begins; None: an attempt is in progress, or no attempt
            follows.
    """

    epoch: _Epoch
    number: str
    name: str
    kind: str
    since: float
    failed: Annotated[int, msgspec.Meta(ge=0)] = 0
    error: str | None = None
    next_at: float | None = None


class Signalled(msgspec.Struct, frozen=True, array_like=True, tag="signalled"):
    """A signal to the run; `value` is JSON text. Of several signals with the same `key`, only the
    first takes effect.
    """

    name: str
    value: bytes
    key: str


class ChildEnded(msgspec.Struct, frozen=True, array_like=True, tag="child ended"):
    """The run `child`, which this run started, may have ended. The record wakes this run, and has
    no other effect.
    """

    child: str


class CancelAsked(msgspec.Struct, frozen=True, array_like=True, tag="cancel asked"):
    """The cancellation of the run is requested."""


class RetryAsked(msgspec.Struct, frozen=True, array_like=True, tag="retry asked"):
    """The owner of the partition should execute the parked run again now."""


class MoveAsked(msgspec.Struct, frozen=True, array_like=True, tag="move asked"):
    """The run should continue with the code of the deployment `code`. The owner of the partition
    answers with a `RunTaken` that names the code with which the run continues.
    """

    code: CodeVersion


class RunParked(msgspec.Struct, frozen=True, array_like=True, tag="parked"):
    """The run waits for other code, or is crash-looping. The record takes effect if `epoch` is the
    current one.

    `version`: a digest of the code with which the round began. `reason`: a text for people.
    """

    epoch: _Epoch
    version: str
    reason: str


class RunFinished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """The run has ended: `result` as JSON text, or `failure`. The record takes effect if `epoch` is
    the current one.

    A list of ended runs reads only this record, so the record also describes the run.

    Attributes:
        workflow: name of its workflow.
        started_at: seqnum of its start.
        began: approximate time of its start, seconds since 1970.
        steps: number of its decided operations.
        version: number of the deployment with whose code it ended; 0: not deployed.
        executor: its last executor.
        round: number of its last round, from 1.
    """

    epoch: _Epoch
    result: bytes
    failure: RecordedFailure | None = None
    was_cancelled: bool = False
    workflow: str = ""
    started_at: SeqNum = 0
    began: float = 0.0
    steps: int = 0
    version: int = 0
    executor: str = ""
    round: int = 1


class RunWaits(msgspec.Struct, frozen=True, array_like=True, tag="waits"):
    """The run only waits, and its executor has removed it from memory. The record takes effect if
    `epoch` is the current one.

    The owner of the partition takes the run when the log's time is `until` (None: no time), or at a
    record for the run. Such a record may come before this one in the log. So `end` tells what the
    execution had read when it decided to leave memory: all records below `end`. `what` says what
    the run waits for.
    """

    epoch: _Epoch
    until: float | None
    what: str
    end: _SeqNum


class UnreadSignal(msgspec.Struct, frozen=True, array_like=True):
    """A signal that no operation has consumed: its seqnum, name, value and key."""

    seqnum: _SeqNum
    name: str
    value: bytes
    key: str


class RunContinued(msgspec.Struct, frozen=True, array_like=True, tag="continued", kw_only=True):
    """The run's round has ended, and its next round begins with these arguments, in the next epoch.

    The record takes effect if `epoch` is the current one. It contains all that the next round
    needs, so the records before it may be trimmed.

    Attributes:
        epoch: epoch of the round that ends.
        round: number of the round that begins; the first one is 1.
        end: the executor had read all records of the run below this seqnum.
        executor: name of the executor of the next round.
        version: a digest of the code.
        started_at: seqnum of the record with which the run began.
        began: time of that record, seconds since 1970.
        cancel_asked: whether a cancellation was requested that the workflow has not noticed.
        signals: the signals that no operation has consumed.
        keys: the keys of the newest signals.
        parent: the step of another run that started the run.
        limit: the limit of the run.
        code: the deployment with whose code the next round begins.
    """

    epoch: _Epoch
    round: Annotated[int, msgspec.Meta(ge=2)]
    end: _SeqNum
    workflow: str
    arguments: bytes
    executor: str
    version: str
    started_at: _SeqNum
    began: float
    cancel_asked: bool
    signals: tuple[UnreadSignal, ...] = ()
    keys: tuple[str, ...] = ()
    parent: Origin | None = None
    limit: RunLimit | None = None
    code: CodeVersion | None = None


class RunForgotten(msgspec.Struct, frozen=True, array_like=True, tag="forgotten"):
    """The start of `run` at seqnum `started_at` opened no run, because it repeated an earlier
    start.

    The record has the tags of the partition and of the limit of the run.
    """

    run: str
    started_at: _SeqNum


class LimitReminded(msgspec.Struct, frozen=True, array_like=True, tag="reminded"):
    """A reminder: at the time of this record, further runs of a limit may begin. `settings` replace
    the settings of the limit; None: they do not change.
    """

    settings: LimitSettings | None = None


class RunKept(msgspec.Struct, frozen=True, array_like=True, tag="kept"):
    """The ended run `run` is kept longer than its retention, for example because it is a child of
    an open run.

    The record lists the run again among the ended runs of its partition. So the earlier entry of
    the run may be trimmed, together with the entries between the two. The record has no other tag.
    """

    run: str


class ScheduleSet(msgspec.Struct, frozen=True, array_like=True, tag="schedule"):
    """The schedule of a workflow is paused, or resumed. The newest record counts."""

    workflow: str
    is_paused: bool


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """`executor` is running. A process that reads this record claims no partition of `executor` for
    `lease_s` seconds.

    Attributes:
        takes: whether the executor has a driver, so that it claims its share of the partitions.
        is_busy: whether it has open runs. A driver without open runs writes heartbeats only while
            another executor has open runs.
        count: number of partitions of the flow; the first record of the flow fixes it.
        owns: the partitions that it owns as of the records below `end`, one bit each.
    """

    executor: str
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=LEASE_S_MAX)]
    takes: bool
    is_busy: bool
    count: Annotated[int, msgspec.Meta(ge=1, le=PARTITIONS_MAX)]
    owns: bytes
    end: _SeqNum


class Claimed(msgspec.Struct, frozen=True, array_like=True, tag="claimed"):
    """`executor` has read the records of executors below `end`, and claims partitions.

    The claim takes effect for a partition without an owner. It also takes effect for a partition
    whose owner has no record between `end` (inclusive) and the claim.
    """

    executor: str
    partitions: _Partitions
    end: _SeqNum


class Released(msgspec.Struct, frozen=True, array_like=True, tag="released"):
    """The owner of these partitions no longer executes their runs. The partitions may have open
    runs.
    """

    executor: str
    partitions: _Partitions


class ExecutorLeft(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """The executor has stopped and owns no partition. Partitions in `busy` may have open runs."""

    executor: str
    busy: _Partitions


RunRecord: TypeAlias = (
    RunStarted
    | RunTaken
    | StepDecided
    | OperationNoted
    | Signalled
    | ChildEnded
    | CancelAsked
    | RetryAsked
    | MoveAsked
    | RunParked
    | RunFinished
    | RunWaits
    | RunContinued
)
PartitionRecord: TypeAlias = RunRecord | RunForgotten
LimitRecord: TypeAlias = PartitionRecord | LimitReminded
ExecutorRecord: TypeAlias = Heartbeat | Claimed | Released | ExecutorLeft
FlowRecord: TypeAlias = LimitRecord | ExecutorRecord | RunKept | ScheduleSet

_decode_run = msgspec.msgpack.Decoder(RunRecord).decode
_decode_partition = msgspec.msgpack.Decoder(PartitionRecord).decode
_decode_limit = msgspec.msgpack.Decoder(LimitRecord).decode
_decode_kept = msgspec.msgpack.Decoder(RunKept).decode
_decode_schedule = msgspec.msgpack.Decoder(ScheduleSet).decode
_decode_executor = msgspec.msgpack.Decoder(ExecutorRecord).decode


def run_tag(run: str) -> str:
    """Return the tag of a run's records.

    Raises:
        FlowSettingsError: the id is invalid.
    """
    if not can_be_in_tag(run, ID_BYTES_MAX):
        raise FlowSettingsError(
            f"A run's id must be 1 to {ID_BYTES_MAX} bytes of text without U+001F, not {run!r:.64}."
        )
    return RUN_PREFIX + run


def partition_of(run: str, partitions: int) -> int:
    """Return the partition of a run, from 0. A child lies in the partition of its parent.

    Args:
        run: id of the run.
        partitions: number of partitions of the flow.
    """
    root = run.split("/", 1)[0].split("@", 1)[0]
    return xxh3_64_intdigest(root.encode()) % partitions


def partition_tag(partition: int) -> str:
    """Return the tag of the records that begin, end or wake runs of a partition."""
    return f"{_PARTITION_PREFIX}{partition}"


def ended_tag(partition: int) -> str:
    """Return the tag of the ends of the runs of a partition."""
    return f"{_ENDED_PREFIX}{partition}"


def starts_tag(workflow: str | None) -> str:
    """Return the tag of the starts of all runs; with a `workflow`, of its runs only."""
    return RUNS_TAG if workflow is None else f"{RUNS_TAG}:{workflow}"


def ends_tag(state: str, workflow: str | None) -> str:
    """Return the tag of the ends of all runs that ended in `state`; with a `workflow`, of its runs
    only.
    """
    tag = f"{_ENDS_PREFIX}{state}"
    return tag if workflow is None else f"{tag}:{workflow}"


def lists_in(tags: tuple[str | int, ...]) -> Iterator[str]:
    """Yield the tags that name lists of ended runs."""
    for tag in tags:
        if isinstance(tag, str) and tag.startswith(_ENDS_PREFIX):
            yield tag


def workflow_in(tags: tuple[str | int, ...]) -> str | None:
    """Return the workflow that the tags of a start name; None: they name none."""
    prefix = starts_tag("")
    for tag in tags:
        if isinstance(tag, str) and tag.startswith(prefix):
            return tag.removeprefix(prefix)
    return None


def schedule_tag(workflow: str) -> str:
    """Return the tag of the records that pause and resume the schedule of a workflow."""
    return _SCHEDULE_PREFIX + workflow


def limit_tag(limit: str) -> str:
    """Return the tag of the records that begin, end, park or take runs of a limit."""
    return _LIMIT_PREFIX + limit


def limit_tags(limit: RunLimit | None) -> tuple[str, ...]:
    """Return the tag that records of a run with this limit have in addition; no tag for None."""
    return () if limit is None else (limit_tag(limit.name),)


def limit_in(tags: tuple[str | int, ...]) -> str | None:
    """Return the name of the limit that a record's tags name; None: they name no limit."""
    for tag in tags:
        if isinstance(tag, str) and tag.startswith(_LIMIT_PREFIX):
            return tag.removeprefix(_LIMIT_PREFIX)
    return None


def run_in(tags: tuple[str | int, ...]) -> str | None:
    """Return the id of the run that a record's tags name; None: they name no run."""
    for tag in tags:
        if isinstance(tag, str) and tag.startswith(RUN_PREFIX):
            return tag.removeprefix(RUN_PREFIX)
    return None


def encode(record: FlowRecord) -> bytes:
    """Return a record's data."""
    return _FORMAT.encoded(record)


def run_record(data: bytes) -> RunRecord | None:
    """Return the record of a run; None if the data is not of BokiFlow.

    Raises:
        FlowVersionError: another version wrote the record.
    """
    return _decoded(data, _decode_run)


def partition_record(data: bytes) -> PartitionRecord | None:
    """Return a record of a partition. None and errors are as in `run_record`."""
    return _decoded(data, _decode_partition)


def limit_record(data: bytes) -> LimitRecord | None:
    """Return a record of a limit. None and errors are as in `run_record`."""
    return _decoded(data, _decode_limit)


def ended_run_in(record: Record) -> str | None:
    """Return the id of the run that a record of the list of ended runs names; None: it names no
    run.

    Raises:
        FlowVersionError: another version wrote the record.
    """
    if (run := run_in(record.tags)) is not None:
        return run
    kept: RunKept | None = _FORMAT.decoded(record.data, _decode_kept)
    return None if kept is None else kept.run


def schedule_record(data: bytes) -> ScheduleSet | None:
    """Return the record of a schedule. None and errors are as in `run_record`."""
    record: ScheduleSet | None = _FORMAT.decoded(data, _decode_schedule)
    return record


def executor_record(data: bytes) -> ExecutorRecord | None:
    """Return the record of an executor. None and errors are as in `run_record`."""
    return _decoded(data, _decode_executor)


def _decoded(data: bytes, decode: Callable[[memoryview], _RecordT]) -> _RecordT | None:
    if data[:2] == _MAGIC and 0 < int.from_bytes(data[2:3]) < VERSION:
        raise FlowVersionError(
            f"A record of BokiFlow has format {data[2]}; this program reads format {VERSION} only. "
            "Let the runs end with the earlier version, then use another log: Flow(log=...)."
        )
    record: _RecordT | None = _FORMAT.decoded(data, decode)
    return record
