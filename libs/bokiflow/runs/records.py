"""BokiFlow's records: one for each event of a run, and heartbeats of executors.

All records of a run have the tag `flow:<id>`, so that sub-stream is the whole history of the run.
Records that start, take over, park or end a run also have the tag of its executor. So the runs of a
dead executor are found without other reads. Starts, takeovers and ends also have `flows`, the list
of runs. The frame is that of `indilog.sdk.record_format`.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from bokiflow.runs.errors import FlowSettingsError, FlowVersionError
from indilog.sdk import TAG_BYTES_MAX, RecordFormat, SeqNum, can_be_in_tag

VERSION: Final = 1
_FORMAT: Final = RecordFormat(b"\xb0F", VERSION, of="BokiFlow", error=FlowVersionError)
RUNS_TAG: Final = "flows"
EXECUTORS_TAG: Final = "flow-executors"
URGENT_TAG: Final = "flow-urgent"
"""Tag of records for executors that drivers handle at once, not at their next iteration."""
PARKED_TAG: Final = "flow-parked"
_RUN_PREFIX: Final = "flow:"
_EXECUTOR_PREFIX: Final = "flow-executor:"
ID_BYTES_MAX: Final = TAG_BYTES_MAX - len(_EXECUTOR_PREFIX)
LEASE_S_MAX: Final = 3600.0

_SeqNum = Annotated[SeqNum, msgspec.Meta(ge=0)]
_Epoch = Annotated[int, msgspec.Meta(ge=1)]


class RecordedFailure(msgspec.Struct, frozen=True, array_like=True):
    """A recorded error: the name of its class, and its message."""

    kind: str
    message: str


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """A step of another run."""

    run: str
    step: str


class RunStarted(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """A run starts, with `executor` in epoch 1; the first such record of a run takes effect.

    `arguments` is a JSON object; `version` is a digest of the code. `parent` is the step that
    started the run, `forked` the step of another run from which it continues.
    """

    workflow: str
    arguments: bytes
    executor: str
    version: str
    parent: Origin | None = None
    forked: Origin | None = None


class RunTaken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """`executor` executes the run in `epoch`; takes effect if the current epoch is one less.

    `crashes` counts the executors in a row that ended right after they got the run (see
    `bokiflow.takeover.crash_loops`).
    """

    epoch: _Epoch
    executor: str
    crashes: Annotated[int, msgspec.Meta(ge=0)] = 0


class StepDecided(msgspec.Struct, frozen=True, array_like=True, tag="decided"):
    """A step has this outcome: `result` as JSON text, or `failure`.

    Takes effect if `epoch` is the current one and no earlier record decides this step number.
    """

    epoch: _Epoch
    number: str
    name: str
    kind: str
    result: bytes
    failure: RecordedFailure | None = None


class Signalled(msgspec.Struct, frozen=True, array_like=True, tag="signalled"):
    """The run was sent a signal; `value` is JSON text. Of several with one `key`, the first takes
    effect.
    """

    name: str
    value: bytes
    key: str


class ChildEnded(msgspec.Struct, frozen=True, array_like=True, tag="child ended"):
    """The run `child`, started by this run, may have ended. Only wakes the parent."""

    child: str


class CancelAsked(msgspec.Struct, frozen=True, array_like=True, tag="cancel asked"):
    """The cancellation of the run is requested."""


class RunParked(msgspec.Struct, frozen=True, array_like=True, tag="parked"):
    """The code of the executor of `epoch` does not match the run. Takes effect in that epoch."""

    epoch: _Epoch
    version: str
    reason: str


class RunFinished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """The run has ended: `result` as JSON text, or `failure`. Takes effect in its epoch."""

    epoch: _Epoch
    result: bytes
    failure: RecordedFailure | None = None
    was_cancelled: bool = False


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """A heartbeat: a process that reads it leaves the runs of `executor` alone for `lease_s`."""

    executor: str
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=LEASE_S_MAX)]


class ExecutorDead(msgspec.Struct, frozen=True, array_like=True, tag="dead"):
    """`new_owner` takes over the orphaned runs of `executor`: its lease had expired by all records
    below `end`.

    Takes effect if no record at or after `end` is about `executor`.
    """

    executor: str
    new_owner: str
    end: _SeqNum


class ExecutorLeft(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """The executor has stopped; `is_idle`: it has no orphaned runs. An executor writes
    `is_idle` of itself only while no append that assigns it a run is unanswered.
    """

    executor: str
    is_idle: bool


RunRecord: TypeAlias = (
    RunStarted
    | RunTaken
    | StepDecided
    | Signalled
    | ChildEnded
    | CancelAsked
    | RunParked
    | RunFinished
)
ExecutorRecord: TypeAlias = Heartbeat | ExecutorDead | ExecutorLeft
FlowRecord: TypeAlias = RunRecord | ExecutorRecord

_decode_run = msgspec.msgpack.Decoder(RunRecord).decode
_decode_executor = msgspec.msgpack.Decoder(ExecutorRecord).decode


def run_tag(run: str) -> str:
    """Return the tag of a run's records.

    Raises:
        FlowSettingsError: the id is invalid.
    """
    if not can_be_in_tag(run, ID_BYTES_MAX):
        raise FlowSettingsError(
            f"A run's id is 1 to {ID_BYTES_MAX} bytes of text without U+001F, not {run!r:.64}."
        )
    return _RUN_PREFIX + run


def executor_tag(executor: str) -> str:
    """Return the tag of the records that assign runs to an executor, or end an assignment."""
    return _EXECUTOR_PREFIX + executor


def run_in(tags: tuple[str | int, ...]) -> str | None:
    """Return the id of the run that a record's tags name."""
    for tag in tags:
        if isinstance(tag, str) and tag.startswith(_RUN_PREFIX):
            return tag.removeprefix(_RUN_PREFIX)
    return None


def encode(record: FlowRecord) -> bytes:
    """Return a record's data."""
    return _FORMAT.encoded(record)


def run_record(data: bytes) -> RunRecord | None:
    """Return the record of a run, None if the data is not of BokiFlow.

    Raises:
        FlowVersionError: a later version wrote the record.
    """
    record: RunRecord | None = _FORMAT.decoded(data, _decode_run)
    return record


def executor_record(data: bytes) -> ExecutorRecord | None:
    """Return the record of an executor; None and errors as `run_record`."""
    record: ExecutorRecord | None = _FORMAT.decoded(data, _decode_executor)
    return record
