"""For authors of libraries that keep their state in a log, such as `bokistore`.

A library imports from two places only: `indilog` (the public API, which its users see too) and this
package. What an application needs is in `indilog`; what only a library needs is here:

- **Identifiers and limits**: `SeqNum`, `UserTag`, `TAG_BYTES_MAX`, `READ_RANGE_LIMIT_MAX`,
  `can_be_in_tag`, `check_bound`.
- **Record format**: `RecordFormat` frames a library's records and refuses those of later versions.
- **Appending and reading back**: `appended` and `check_own_append` report what an appended record
  had as its effect.
- **Damage and trims**: `leftover`, `may_go_further`, `Losses`, `named`.
- **Time and waiting**: `LogClock` estimates the time of a log, `Event` lets callers wait on an
  event loop or under a stepper.
- **Functions**: `Signature`, `ResultType`, `arguments_text` and `plain_value` convert arguments and
  results of typed Python functions; `function_of` and `current_context` find the application's
  function and the context of the running call.
"""

from typing import TYPE_CHECKING

from indilog.base.ids import TAG_BYTES_MAX, SeqNum, UserTag, can_be_in_tag
from indilog.base.lazy_names import lazy_names
from indilog.base.log import READ_RANGE_LIMIT_MAX, check_bound
from indilog.sdk.event import Event
from indilog.sdk.log_clock import LogClock
from indilog.sdk.losses import Losses, named
from indilog.sdk.outcomes import appended, check_own_append
from indilog.sdk.record_format import RecordFormat
from indilog.sdk.surviving_records import leftover, may_go_further

if TYPE_CHECKING:
    from indilog.apps.context import current_context
    from indilog.apps.function import Function, function_of
    from indilog.apps.signature import ResultType, Signature, arguments_text, plain_value

__all__ = [
    "READ_RANGE_LIMIT_MAX",
    "TAG_BYTES_MAX",
    "Event",
    "Function",
    "LogClock",
    "Losses",
    "RecordFormat",
    "ResultType",
    "SeqNum",
    "Signature",
    "UserTag",
    "appended",
    "arguments_text",
    "can_be_in_tag",
    "check_bound",
    "check_own_append",
    "current_context",
    "function_of",
    "leftover",
    "may_go_further",
    "named",
    "plain_value",
]

__getattr__ = lazy_names(
    __name__,
    {
        "indilog.apps.context": ["current_context"],
        "indilog.apps.function": ["Function", "function_of"],
        "indilog.apps.signature": ["ResultType", "Signature", "arguments_text", "plain_value"],
    },
)
