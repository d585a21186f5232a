"""BokiFlow's records: events of runs, and heartbeats of executors.

All records of a run have the tag `flow:<id>`, so this sub-stream is the whole history of the run.
Records that start, take over, park or end a run also have the tag of its executor. So the
sub-stream of a dead executor names its runs. Starts, takeovers and ends also have the tag `flows`,
so its sub-stream lists all runs. `indilog.sdk.record_format` defines the frame of a record.
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
"""Tag of records that drivers handle at once, not at their next iteration."""
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
    """A run starts, with `executor` in epoch 1. Only the first such record of a run takes effect.

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
    """`executor` executes the run in `epoch`. Takes effect if the current epoch is one less.

    `crashes` counts how many executors in a row crashed right after they got the run
    (`bokiflow.takeover.crash_loops`).
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
    """A signal to the run; `value` is JSON text. Of several signals with one `key`, the first takes
    effect.
    """

    name: str
    value: bytes
    key: str


class ChildEnded(msgspec.Struct, frozen=True, array_like=True, tag="child ended"):
    """The run `child`, which this run started, may have ended. The record only wakes this run."""

    child: str


class CancelAsked(msgspec.Struct, frozen=True, array_like=True, tag="cancel asked"):
    """The cancellation of the run is requested."""


class RunParked(msgspec.Struct, frozen=True, array_like=True, tag="parked"):
    """The run waits for other code, or is crash-looping. Takes effect if `epoch` is the current
    one.
    """

    epoch: _Epoch
    version: str
    reason: str


class RunFinished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """The run has ended: `result` as JSON text, or `failure`. Takes effect if `epoch` is the
    current one.
    """

    epoch: _Epoch
    result: bytes
    failure: RecordedFailure | None = None
    was_cancelled: bool = False


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """`executor` is running. A process that reads this takes over no run of `executor` for
    `lease_s` seconds.
    """

    executor: str
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=LEASE_S_MAX)]


class ExecutorDead(msgspec.Struct, frozen=True, array_like=True, tag="dead"):
    """`new_owner` takes over the runs of `executor`, whose lease had ended as of the records below
    `end`.

    Takes effect if no record about `executor` is between `end` and this record.
    """

    executor: str
    new_owner: str
    end: _SeqNum


class ExecutorLeft(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """The executor has stopped. `is_idle`: no runs remain to be taken over. An executor writes
    `is_idle` about itself only if no append that assigns it a run is in flight.
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
            f"A run's id must be 1 to {ID_BYTES_MAX} bytes of text without U+001F, not {run!r:.64}."
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
    """Return the record of a run; None if the data is not of BokiFlow.

    Raises:
        FlowVersionError: a later version wrote the record.
    """
    record: RunRecord | None = _FORMAT.decoded(data, _decode_run)
    return record


def executor_record(data: bytes) -> ExecutorRecord | None:
    """Return the record of an executor. None and errors are as in `run_record`."""
    record: ExecutorRecord | None = _FORMAT.decoded(data, _decode_executor)
    return record
