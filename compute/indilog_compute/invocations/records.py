"""The records of `$invocations` (docs/FORMATS.md).

Each invocation belongs to a *stream*, which is a tag. A record has the tags of all its invocations.
Each stream is trimmed up to its oldest invocation that is still needed. Invocations with about the
same lifetime share a stream. So an invocation that is due in a year does not prevent the trim of
other invocations. `InvocationTable` applies the records. `indilog.sdk.record_format` defines the
frame of a record.
"""

from __future__ import annotations

import contextlib
import hashlib
from bisect import bisect_left
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from xxhash import xxh3_64_intdigest

from indilog.base.errors import IndilogError
from indilog.base.ids import MetalogPosition, SeqNum
from indilog.sdk.record_format import RecordFormat

INVOCATIONS_LOG: Final = "$invocations"
VERSION: Final = 3
_VERSIONS_READ: Final = (2,)
"""Earlier versions that are read. Records of these versions lack the last fields of their types,
which then have default values.
"""
EXECUTORS_TAG: Final = "executors"
CHECKPOINTS_TAG: Final = "checkpoints"
_STREAM_DELAYS_S: Final = (600.0, 6 * 3600.0, 3 * 86_400.0, 45 * 86_400.0)
_HELD_STREAMS: Final = 64
"""Number of streams of held invocations. An invocation that is held for long prevents the trim of
its stream only, so with many streams it affects few other invocations.
"""
STREAMS: Final = tuple(f"delay:{n}" for n in range(len(_STREAM_DELAYS_S) + 1))
KEY_CHARACTERS_MAX: Final = 255
HOLDER_CHARACTERS_MAX: Final = 512
_NO_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of decoding text that is not JSON, or is nested too deeply."""

_SeqNum = Annotated[SeqNum, msgspec.Meta(ge=0)]


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The failure of a call, with the fields of `indilog.link.link_messages.Failed`."""

    kind: str
    message: str
    attributes: dict[str, Any]


class InvocationAccepted(
    msgspec.Struct, frozen=True, array_like=True, tag="accepted", kw_only=True
):
    """Accepts an invocation.

    Attributes:
        executor: the executor that runs the invocation at once if `delay_s` is 0.
        position: the metalog position of the caller's session.
        stream: the tag of the invocation's records.
        delay_s: seconds from this record's time until the invocation is due. If it is not 0, an
            executor must claim the invocation.
        depth: number of calls above the invocation in the chain of calls.
        key: the idempotency key; of several records of a function with one key, the first takes
            effect. Empty: the call has no key.
        schedule: the schedule that causes the invocation; empty: a caller causes it.
        at: the due time of the schedule (wall clock, seconds since 1970).
        after: the previous due time of the schedule. The record takes effect only if `after` is the
            schedule's last accepted due time (0: none was accepted). So each due time takes effect
            once, even if the wall clock is set back.
        holder: the run for which the outcome is held, until a `CallsReleased` record releases it.
            Empty: the outcome is not held.
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
    holder: str = ""


class InvocationsClaimed(msgspec.Struct, frozen=True, array_like=True, tag="claimed"):
    """`executor` claims the invocations `ids`, and runs those that are due and have no executor."""

    executor: str
    ids: tuple[str, ...]


class Freed(msgspec.Struct, frozen=True, array_like=True, tag="freed"):
    """`executor` no longer runs the invocation `id`, which has no outcome.

    If `is_lost`, the invocation had begun and may have had effects, so the try counts.
    """

    executor: str
    id: str
    is_lost: bool


class InvocationEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """The outcome of an invocation: `result`, which is JSON text, or `failure`. Only the first
    outcome of an invocation takes effect.
    """

    executor: str
    id: str
    position: MetalogPosition
    result: bytes | None
    failure: Failure | None = None


class CallsReleased(msgspec.Struct, frozen=True, array_like=True, tag="released"):
    """The invocations `ids` are no longer held, because the holder has recorded their outcomes or
    has ended. From this record on, these outcomes are kept like other outcomes.
    """

    ids: tuple[str, ...]


class ExecutorHeartbeat(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """`executor` still runs its invocations."""

    executor: str


class DeclaredDead(msgspec.Struct, frozen=True, array_like=True, tag="given up"):
    """The executor `by` declares `executor` dead. The record takes effect only if `executor` has no
    record after seqnum `seen`.
    """

    executor: str
    seen: _SeqNum
    by: str


class Checkpointed(msgspec.Struct, frozen=True, array_like=True, tag="checkpointed"):
    """One of the `parts` records of a checkpoint. The checkpoint covers the `count` records below
    seqnum `end`.

    All parts of a checkpoint have the same `id`. `follows` is the seqnum after the last part of the
    newest checkpoint that the author had read; 0: it had read none. The checkpoint is valid only if
    no other checkpoint was completed after that one. Such a checkpoint may cover records that the
    author had not read and that are trimmed now.
    """

    id: str
    part: Annotated[int, msgspec.Meta(ge=0)]
    parts: Annotated[int, msgspec.Meta(ge=1)]
    count: Annotated[int, msgspec.Meta(ge=0)]
    end: _SeqNum
    data: bytes
    follows: _SeqNum = 0


Event: TypeAlias = (
    InvocationAccepted
    | InvocationsClaimed
    | Freed
    | InvocationEnded
    | CallsReleased
    | ExecutorHeartbeat
    | DeclaredDead
    | Checkpointed
)


class InvocationsVersionError(IndilogError):
    """A later version of the platform wrote a record of `$invocations`."""


_FORMAT: Final = RecordFormat(
    b"\xb0V",
    VERSION,
    of="invocations",
    error=InvocationsVersionError,
    versions_read=_VERSIONS_READ,
)
_decode = msgspec.msgpack.Decoder(Event).decode


def encode(event: Event) -> bytes:
    """Return a record's data."""
    return _FORMAT.encoded(event)


def decode(data: bytes) -> Event | None:
    """Return the event in a record; None if the data is not an event.

    Raises:
        InvocationsVersionError: a later version wrote the record, so it must not be skipped.
    """
    event: Event | None = _FORMAT.decoded(data, _decode)
    return event


def application_of(function: str) -> str:
    """Return the application of `application.function`."""
    return function.partition(".")[0]


def stream_of(delay_s: float, key: str = "") -> str:
    """Return the stream (a tag) of an invocation that is due in `delay_s` seconds."""
    stream = STREAMS[bisect_left(_STREAM_DELAYS_S, delay_s)]
    return f"key:{stream}" if key else stream  # invocations with a key are kept longer


def held_stream(holder: str) -> str:
    """Return the stream of the invocations that are held for `holder`."""
    return f"held:{xxh3_64_intdigest(holder.encode()) % _HELD_STREAMS}"


def schedule_tag(schedule: str) -> str:
    """Return the stream of a schedule's invocations."""
    return f"schedule:{hashlib.blake2b(schedule.encode(), digest_size=16).hexdigest()}"


def digest_of(arguments: bytes) -> bytes:
    """Return a digest of JSON text. Equal JSON values have the same digest, even if the spacing or
    the order of keys differs.
    """
    with contextlib.suppress(*_NO_JSON):  # invalid JSON is refused elsewhere
        arguments = msgspec.json.encode(msgspec.json.decode(arguments or b"{}"), order="sorted")
    return hashlib.blake2b(arguments, digest_size=16).digest()
