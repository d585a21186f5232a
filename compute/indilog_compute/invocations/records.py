"""The records of `$invocations` (docs/FORMATS.md).

An event about invocations has the tags of their streams: those that live about equally long share
one, so that a stream can be trimmed up to its oldest invocation that is still needed without one
that is due in a year holding up the others. The frame is that of `indilog.sdk.record_format`.
"""

from __future__ import annotations

import contextlib
import hashlib
from bisect import bisect_left
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from indilog.base.errors import IndilogError
from indilog.base.ids import MetalogPosition, SeqNum
from indilog.sdk.record_format import RecordFormat

INVOCATIONS_LOG: Final = "$invocations"
VERSION: Final = 2
EXECUTORS_TAG: Final = "executors"
CHECKPOINTS_TAG: Final = "checkpoints"
_STREAM_DELAYS_S: Final = (600.0, 6 * 3600.0, 3 * 86_400.0, 45 * 86_400.0)
STREAMS: Final = tuple(f"delay:{n}" for n in range(len(_STREAM_DELAYS_S) + 1))
KEY_CHARACTERS_MAX: Final = 255
_NO_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What is no JSON, or nested too deeply."""

_SeqNum = Annotated[SeqNum, msgspec.Meta(ge=0)]


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The failure of a call for its caller (`indilog.link.link_messages.Failed`)."""

    kind: str
    message: str
    attributes: dict[str, Any]


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted", kw_only=True):
    """This invocation is to run: at once, by `executor`; or, if `delay_s` is not 0, by the executor
    that claims it when that time has passed since this record was ordered. `stream`: its tag.

    `key`: the first one of a function with it counts. `schedule` and `at`: the due time of a
    schedule by the wall clock, seconds since 1970. It counts if the one that counted last is
    `after` (0: none), so that each counts once and a wall clock that was set back goes on.
    `depth`: calls above it.
    """

    id: str
    executor: str
    function: str
    arguments: bytes
    position: MetalogPosition
    stream: str
    delay_s: float = 0.0
    depth: int = 0
    key: str = ""
    schedule: str = ""
    at: float = 0.0
    after: float = 0.0


class Claimed(msgspec.Struct, frozen=True, array_like=True, tag="claimed"):
    """`executor` runs those of the invocations that no executor runs."""

    executor: str
    ids: tuple[str, ...]


class Freed(msgspec.Struct, frozen=True, array_like=True, tag="freed"):
    """`executor` does not run this invocation any more; it is not over.

    `is_lost`: it may have had effects, and counts as a try.
    """

    executor: str
    id: str
    is_lost: bool


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """What came of an invocation: JSON text, or a failure. The first one counts."""

    executor: str
    id: str
    position: MetalogPosition
    result: bytes | None
    failure: Failure | None = None


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """A heartbeat: `executor` continues what it runs."""

    executor: str


class GivenUp(msgspec.Struct, frozen=True, array_like=True, tag="given up"):
    """`executor` is dead, says `by`, unless it has said anything beyond the seqnum `seen`."""

    executor: str
    seen: _SeqNum
    by: str


class Checkpointed(msgspec.Struct, frozen=True, array_like=True, tag="checkpointed"):
    """One of `parts` records that together say what the first `count` records amount to: those
    below the seqnum `end`. `id` tells which belong together.

    `follows`: what comes behind the last part of the checkpoint that its author went by, 0: there
    was none. It counts only if that is still the newest when its own last part is read: otherwise
    its author had missed what others covered, and trimmed, meanwhile.
    """

    id: str
    part: Annotated[int, msgspec.Meta(ge=0)]
    parts: Annotated[int, msgspec.Meta(ge=1)]
    count: Annotated[int, msgspec.Meta(ge=0)]
    end: _SeqNum
    data: bytes
    follows: _SeqNum = 0


Event: TypeAlias = Accepted | Claimed | Freed | Ended | Heartbeat | GivenUp | Checkpointed


class InvocationsVersionError(IndilogError):
    """A later version of the platform wrote to the log of invocations."""


_FORMAT: Final = RecordFormat(b"\xb0V", VERSION, of="invocations", error=InvocationsVersionError)
_decode = msgspec.msgpack.Decoder(Event).decode


def encoded(event: Event) -> bytes:
    """Return a record's data."""
    return _FORMAT.encoded(event)


def decoded(data: bytes) -> Event | None:
    """Return the event in a record, or None for what is none.

    Raises:
        InvocationsVersionError: a later version wrote it, so it must not be passed over.
    """
    event: Event | None = _FORMAT.decoded(data, _decode)
    return event


def application_of(function: str) -> str:
    """Return the application of `application.function`."""
    return function.partition(".")[0]


def stream_of(delay_s: float, key: str = "") -> str:
    """Return the stream (a tag) of an invocation that is due after `delay_s`."""
    stream = STREAMS[bisect_left(_STREAM_DELAYS_S, delay_s)]
    return f"key:{stream}" if key else stream  # those with a key are kept longer


def schedule_tag(schedule: str) -> str:
    """Return the stream of a schedule's invocations."""
    return f"schedule:{hashlib.blake2b(schedule.encode(), digest_size=16).hexdigest()}"


def digest_of(arguments: bytes) -> bytes:
    """Return what is equal for equal JSON arguments, however they are spelled."""
    with contextlib.suppress(*_NO_JSON):  # what is none is refused elsewhere
        arguments = msgspec.json.encode(msgspec.json.decode(arguments or b"{}"), order="sorted")
    return hashlib.blake2b(arguments, digest_size=16).digest()
