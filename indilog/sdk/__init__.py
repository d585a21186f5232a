"""The interface for authors of libraries that keep their state in a log, such as `bokistore`.

A library imports from three places only: `indilog` (the public API), this package, and
`indilog.replayed` (state derived from records). Names for applications are in `indilog`; names only
for libraries are here:

- **Identifiers and limits**: `SeqNum`, `MAX_SEQNUM`, `UserTag`, `TAG_BYTES_MAX`,
  `READ_RANGE_LIMIT_MAX`, `can_be_in_tag`, `check_bound`.
- **Logs by name**: a context, a client and `MemoryLogs` are `Logs`.
- **Record format**: `RecordFormat` frames a library's records, and refuses records of other
  versions.
- **Appending and reading back**: `append_outcome_unknown` and `check_own_append`, for a library
  that appends a record and then reads its effect.
- **Damage and trims**: `read_surviving_records`, `may_go_further`, `Losses`, `name_loss`.
- **Time and waiting**: `LogClock` estimates the time of a log, `Event` lets callers wait on an
  event loop or under a stepper. `run_to_end` and `run_in_background` run work that outlives a
  cancelled caller.
- **What people see**: `indilog.sdk.runs` has the values of the operations `runs.*`, by which the
  platform shows and steers workflow runs (`indilog.App.add_operation`).
- **Functions**: `Signature`, `ResultType`, `arguments_text` and `plain_value` convert arguments and
  results of typed Python functions. `function_of` and `current_context` find the application's
  function and the context of the running call. `note_error` tells a worker about an error of the
  application's code that a library handles.
"""

from typing import TYPE_CHECKING

from indilog.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from indilog.apps.app import DeployedVersion
    from indilog.apps.context import current_context
    from indilog.apps.function import Function, function_of
    from indilog.apps.schedule import due_between, next_due
    from indilog.apps.signature import ResultType, Signature, arguments_text, plain_value
    from indilog.base.deployed import CatchUp, ScheduleSpec
    from indilog.base.ids import MAX_SEQNUM, TAG_BYTES_MAX, SeqNum, UserTag, can_be_in_tag
    from indilog.base.log import READ_RANGE_LIMIT_MAX, Logs, check_bound
    from indilog.base.memory_errors import note_error
    from indilog.sdk.event import Event
    from indilog.sdk.log_clock import LogClock
    from indilog.sdk.losses import Losses, name_loss
    from indilog.sdk.outcomes import append_outcome_unknown, check_own_append
    from indilog.sdk.record_format import RecordFormat
    from indilog.sdk.surviving_records import may_go_further, read_surviving_records
    from indilog.sdk.tasks import run_in_background, run_to_end

__all__ = [
    "MAX_SEQNUM",
    "READ_RANGE_LIMIT_MAX",
    "TAG_BYTES_MAX",
    "CatchUp",
    "DeployedVersion",
    "Event",
    "Function",
    "LogClock",
    "Logs",
    "Losses",
    "RecordFormat",
    "ResultType",
    "ScheduleSpec",
    "SeqNum",
    "Signature",
    "UserTag",
    "append_outcome_unknown",
    "arguments_text",
    "can_be_in_tag",
    "check_bound",
    "check_own_append",
    "current_context",
    "due_between",
    "function_of",
    "may_go_further",
    "name_loss",
    "next_due",
    "note_error",
    "plain_value",
    "read_surviving_records",
    "run_in_background",
    "run_to_end",
]

__getattr__ = lazy_names(
    __name__,
    {
        "indilog.apps.app": ["DeployedVersion"],
        "indilog.apps.context": ["current_context"],
        "indilog.apps.function": ["Function", "function_of"],
        "indilog.apps.schedule": ["due_between", "next_due"],
        "indilog.apps.signature": ["ResultType", "Signature", "arguments_text", "plain_value"],
        "indilog.base.deployed": ["CatchUp", "ScheduleSpec"],
        "indilog.base.ids": ["MAX_SEQNUM", "TAG_BYTES_MAX", "SeqNum", "UserTag", "can_be_in_tag"],
        "indilog.base.log": ["READ_RANGE_LIMIT_MAX", "Logs", "check_bound"],
        "indilog.base.memory_errors": ["note_error"],
        "indilog.sdk.event": ["Event"],
        "indilog.sdk.log_clock": ["LogClock"],
        "indilog.sdk.losses": ["Losses", "name_loss"],
        "indilog.sdk.outcomes": ["append_outcome_unknown", "check_own_append"],
        "indilog.sdk.record_format": ["RecordFormat"],
        "indilog.sdk.surviving_records": ["may_go_further", "read_surviving_records"],
        "indilog.sdk.tasks": ["run_in_background", "run_to_end"],
    },
)
