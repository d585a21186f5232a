"""What a workflow keeps in the log: a record per thing that happens to a run, and the executors'
signs of life.

All records of a run have the tag `flow:<id>`, so its sub-stream is all that can have changed it.
Those that begin, move or end a run have the tag of its executor too, so that what a dead executor
leaves behind is found without reading anything else; starts, takeovers and ends have `flows`, the
list of runs. The frame is that of `indilog.sdk.record_format`.
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
"""Of those records for executors that drivers do not let wait for their next turn."""
PARKED_TAG: Final = "flow-parked"
_RUN_PREFIX: Final = "flow:"
_EXECUTOR_PREFIX: Final = "flow-executor:"
ID_BYTES_MAX: Final = TAG_BYTES_MAX - len(_EXECUTOR_PREFIX)
LEASE_S_MAX: Final = 3600.0

_SeqNum = Annotated[SeqNum, msgspec.Meta(ge=0)]
_Epoch = Annotated[int, msgspec.Meta(ge=1)]


class RecordedFailure(msgspec.Struct, frozen=True, array_like=True):
    """An error as it is kept: the name of its class, and its words."""

    kind: str
    message: str


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """A step of another run."""

    run: str
    step: str


class RunStarted(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """A run begins, with `executor` in epoch 1; the first such record of a run counts.

    `arguments` is a JSON object; `version` names the code; `parent` is the step that started it,
    `forked` the step of another run from which it goes on.
    """

    workflow: str
    arguments: bytes
    executor: str
    version: str
    parent: Origin | None = None
    forked: Origin | None = None


class RunTaken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """`executor` executes the run in `epoch`; counts if the epoch before is the newest so far.

    `crashes` is how many executors before it ended, one after the other, right after they got the
    run (see `bokiflow.takeover.crash_loops`).
    """

    epoch: _Epoch
    executor: str
    crashes: Annotated[int, msgspec.Meta(ge=0)] = 0


class StepDecided(msgspec.Struct, frozen=True, array_like=True, tag="decided"):
    """A step has this outcome: `result` as JSON text, or `failure`.

    Counts if `epoch` is the run's newest and no record before decides the step of this number.
    """

    epoch: _Epoch
    number: str
    name: str
    kind: str
    result: bytes
    failure: RecordedFailure | None = None


class Signalled(msgspec.Struct, frozen=True, array_like=True, tag="signalled"):
    """Somebody sent the run a signal; `value` is JSON text. Of those with one `key`, the first
    counts.
    """

    name: str
    value: bytes
    key: str


class ChildEnded(msgspec.Struct, frozen=True, array_like=True, tag="child ended"):
    """The run `child`, which this run started, may have ended: look. Has no other effect."""

    child: str


class CancelAsked(msgspec.Struct, frozen=True, array_like=True, tag="cancel asked"):
    """Somebody wants the run to be cancelled."""


class RunParked(msgspec.Struct, frozen=True, array_like=True, tag="parked"):
    """The executor of `epoch` cannot go on with its code; counts as `StepDecided`."""

    epoch: _Epoch
    version: str
    reason: str


class RunFinished(msgspec.Struct, frozen=True, array_like=True, tag="finished"):
    """The run has ended: `result` as JSON text, or `failure`; counts as `StepDecided`."""

    epoch: _Epoch
    result: bytes
    failure: RecordedFailure | None = None
    was_cancelled: bool = False


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """The executor lives: nobody who has read this takes its runs for `lease_s` from then on."""

    executor: str
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=LEASE_S_MAX)]


class ExecutorDead(msgspec.Struct, frozen=True, array_like=True, tag="dead"):
    """`new_owner` takes over what `executor` left; its lease was over as of all records below
    `end`.

    Counts if no record from there on says anything of `executor`.
    """

    executor: str
    new_owner: str
    end: _SeqNum


class ExecutorLeft(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """The executor stops; `is_idle`: it has left no run behind. Of itself it says so only if
    nothing is on its way either that gives it one.
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
        FlowSettingsError: no run can have this id.
    """
    if not can_be_in_tag(run, ID_BYTES_MAX):
        raise FlowSettingsError(
            f"A run's id is 1 to {ID_BYTES_MAX} bytes of text without U+001F, not {run!r:.64}."
        )
    return _RUN_PREFIX + run


def executor_tag(executor: str) -> str:
    """Return the tag of the records that give runs to an executor or take them from it."""
    return _EXECUTOR_PREFIX + executor


def run_in(tags: tuple[str | int, ...]) -> str | None:
    """Return the id of the run that a record's tags name."""
    for tag in tags:
        if isinstance(tag, str) and tag.startswith(_RUN_PREFIX):
            return tag.removeprefix(_RUN_PREFIX)
    return None


def encoded(record: FlowRecord) -> bytes:
    """Return a record's data."""
    return _FORMAT.encoded(record)


def run_record(data: bytes) -> RunRecord | None:
    """Return what a record says of a run, or None for what BokiFlow did not write.

    Raises:
        FlowVersionError: a later version wrote it, so it must not be passed over.
    """
    record: RunRecord | None = _FORMAT.decoded(data, _decode_run)
    return record


def executor_record(data: bytes) -> ExecutorRecord | None:
    """Return what a record says of an executor; None and errors as `run_record`."""
    record: ExecutorRecord | None = _FORMAT.decoded(data, _decode_executor)
    return record
