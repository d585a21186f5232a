"""The messages on a link (ARCHITECTURE 8.1, docs/decisions/0003): questions of workers and clients
to a compute node, questions to a worker, and the answers.

A link (`indilog.link.link`) is a stream: each message arrives once and in order, or the link is
closed. So in each docstring, `Lost:` says what the asker gets when the link closes, and `Repeated:`
is mostly "never". The asker numbers its questions, and the answer carries the number
(`indilog.link.frames.Frame`). Each direction has its own numbers. Questions and answers have
different types, so a number that is used in both directions is not ambiguous.

Positions are metalog positions. A question carries the position of the asker's session. An answer
carries the position at which the question was answered (ARCHITECTURE 9). Arguments and results of
functions are JSON text. The compute node passes this text on without parsing it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, TypeAlias

import msgspec

from indilog.base import errors
from indilog.base.deployed import AppInfo
from indilog.base.errors import CallOutcomeUnknownError, IndilogError, NotReadyError
from indilog.base.ids import MetalogPosition, SeqNum, ShardId, UserTag
from indilog.base.log import (
    BATCH_RECORDS_LIMIT,
    BATCH_TAGS_LIMIT,
    RECORD_TAGS_LIMIT,
    After,
    PlacedSpan,
)
from indilog.link.link_message import SOURCES_LIMIT
from indilog.link.link_message import LinkStruct as _Message
from indilog.link.retention_messages import LogRetention, LogSetRetention, RetentionFound
from indilog.link.worker_messages import (
    CheckArguments,
    Invoke,
    Load,
    Loaded,
    MemoryUsedUp,
    Ping,
    Ready,
    RunServices,
    ServicesChanged,
    ThreadsLeft,
    Unload,
)

LINK_VERSION: Final = 9
"""Version of the protocol. The compute node sends it in `Welcome`, and a worker in `Ready`. A link
between different versions is closed.
"""
KEYS_LIMIT: Final = 1000
"""Largest number of keys in one message."""


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """The platform's limits. The compute node sends them, so that a worker or client can refuse a
    too large value without asking the node.
    """

    record_bytes_max: int
    record_tags_max: int
    aux_bytes_max: int
    result_bytes_max: int
    message_bytes_max: int


class RecordValue(msgspec.Struct, frozen=True, array_like=True):
    """A record on a link; `names` has its log and tags as text (`indilog.base.ids.tag_columns`)."""

    seqnum: SeqNum
    names: bytes
    data: bytes
    time: float
    ordered_at: float
    aux: bytes | None


# --- greetings


class Welcome(_Message, frozen=True):
    """compute node → worker, client: the version and limits of this compute node.

    Lost: the link is closed; the worker or client has sent no question yet.
    Repeated: never.
    """

    version: int
    limits: Limits


# --- the log


class LogAppend(_Message, frozen=True):
    """worker, client → compute node: append a record; answered by `Appended`.

    Lost: the outcome is unknown to the asker (`AppendOutcomeUnknownError`).
    Repeated: never.
    """

    log: str
    position: MetalogPosition
    data: bytes
    tags: Annotated[tuple[UserTag, ...], msgspec.Meta(max_length=RECORD_TAGS_LIMIT)]


class LogAppendBatch(_Message, frozen=True):
    """worker, client → compute node: append records, all or none; answered by `Appended`.

    `tags` has the tags of all records, one record after the other; `tag_counts` has the number of
    tags of each record. So the lengths of these lists bound the cost of decoding the message. The
    records are appended only if the condition `after` holds; None: no condition.
    Lost: the outcome is unknown to the asker (`AppendOutcomeUnknownError`).
    Repeated: never.
    """

    log: str
    position: MetalogPosition
    data: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=BATCH_RECORDS_LIMIT)]
    tags: Annotated[tuple[UserTag, ...], msgspec.Meta(max_length=BATCH_TAGS_LIMIT)]
    tag_counts: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=BATCH_RECORDS_LIMIT)
    ]
    after: After | None = None

    @classmethod
    def of(
        cls,
        log: str,
        position: MetalogPosition,
        entries: Iterable[tuple[bytes, tuple[UserTag, ...]]],
        after: After | None = None,
    ) -> LogAppendBatch:
        """Return the message for records, each with its tags."""
        data, of_each = zip(*entries, strict=True)
        tags = tuple(tag for tags in of_each for tag in tags)
        return cls(log, position, data, tags, tuple(map(len, of_each)), after)

    def entries(self) -> Iterator[tuple[bytes, tuple[UserTag, ...]]]:
        """Yield the records, each with its tags.

        Raises:
            ValueError: the counts do not match the records and tags.
        """
        if len(self.tag_counts) != len(self.data) or sum(self.tag_counts) != len(self.tags):
            raise ValueError(
                "The number of tags in the batch differs from the sum of its tag counts."
            )
        start = 0
        for data, count in zip(self.data, self.tag_counts, strict=True):
            yield data, self.tags[start : start + count]
            start += count


class LogRead(_Message, frozen=True):
    """worker, client → compute node: the record at a seqnum; answered by `RecordsFound`.

    Lost: the asker gets a `NotReadyError`; nothing was changed.
    Repeated: never.
    """

    log: str
    position: MetalogPosition
    seqnum: SeqNum
    fresh: bool = False


class LogReadNext(_Message, frozen=True):
    """worker, client → compute node: the first record from `bound` on; answered by `RecordsFound`,
    after at most `wait_s` seconds if there is no record yet.

    Lost: the asker gets a `NotReadyError`; nothing was changed.
    Repeated: never.
    """

    log: str
    position: MetalogPosition
    tag: UserTag | None
    bound: SeqNum
    wait_s: float | None
    fresh: bool = False


class LogReadPrev(_Message, frozen=True):
    """worker, client → compute node: the last record up to `bound`; answered by `RecordsFound`.

    Lost: the asker gets a `NotReadyError`; nothing was changed.
    Repeated: never.
    """

    log: str
    position: MetalogPosition
    tag: UserTag | None
    bound: SeqNum
    fresh: bool = False


class LogReadRange(_Message, frozen=True):
    """worker, client → compute node: a page of records from `bound` on; answered by `RecordsFound`,
    after at most `wait_s` seconds if there is no record yet.

    Lost: the asker gets a `NotReadyError`; nothing was changed.
    Repeated: never.
    """

    log: str
    position: MetalogPosition
    tag: UserTag | None
    bound: SeqNum
    limit: int
    fresh: bool = False
    wait_s: float | None = None


class LogTail(_Message, frozen=True):
    """worker, client → compute node: the first seqnum not yet written; answered by `TailFound`.

    Lost: the asker gets a `NotReadyError`; nothing was changed.
    Repeated: never.
    """

    log: str
    position: MetalogPosition


class LogNow(_Message, frozen=True):
    """worker, client → compute node: the time of the log (`Log.now`); answered by `TimeIs`.

    Lost: the asker gets a `NotReadyError`; nothing was changed.
    Repeated: never.
    """

    log: str
    position: MetalogPosition


class LogFindTime(_Message, frozen=True):
    """worker, client → compute node: the first seqnum ordered at `time` (seconds since 1970) or
    later; answered by `TailFound`.

    Lost: the asker gets a `NotReadyError`; nothing was changed.
    Repeated: never.
    """

    log: str
    position: MetalogPosition
    time: float


class LogPlaces(_Message, frozen=True):
    """client → compute node: the places of the records of all logs with seqnums from `start` to
    below `end`; answered by `PlacesAre`.

    Lost: the asker gets a `NotReadyError`; nothing was changed.
    Repeated: never.
    """

    log: str
    position: MetalogPosition
    start: SeqNum
    end: SeqNum


class LogShard(_Message, frozen=True):
    """client → compute node: the shard that this compute node writes; answered by `ShardFound`.

    Lost: the asker gets a `NotReadyError`; nothing was changed.
    Repeated: never.
    """

    log: str
    position: MetalogPosition


class LogSetAux(_Message, frozen=True):
    """worker, client → compute node: cache `aux` with a record; answered by `Done`.

    Lost: the aux data may be missing; callers must expect missing aux data at any time.
    Repeated: never.
    """

    log: str
    position: MetalogPosition
    seqnum: SeqNum
    aux: bytes


class LogTrim(_Message, frozen=True):
    """worker, client → compute node: delete the records below `until`; answered by `Done`.

    Lost: the asker gets a `NotReadyError`; the trim may have happened, and repeating it is
    harmless.
    Repeated: never.
    """

    log: str
    position: MetalogPosition
    tag: UserTag | None
    until: SeqNum


# --- functions


class CallFunction(_Message, frozen=True):
    """worker, client → compute node: run `app.function` and return its result; answered by
    `Returned`.

    `depth` is the number of calls above this call in the chain; a client's call has 0. A call with
    an idempotency `key` is recorded and has one outcome. The node continues a recorded call even if
    no caller waits for it. With a `holder`, the outcome is held until `ReleaseCalls`.
    Lost: the outcome is unknown to the asker (`CallOutcomeUnknownError`). The node cancels a call
    without a key.
    Repeated: never.
    """

    function: str
    arguments: bytes
    position: MetalogPosition
    depth: int
    key: str = ""
    holder: str = ""


class SendFunction(_Message, frozen=True):
    """worker, client → compute node: run `app.function` later, without waiting; answered by
    `Accepted`.

    Lost: the outcome is unknown to the caller (`CallOutcomeUnknownError`); an accepted invocation
    runs.
    Repeated: never.
    """

    function: str
    arguments: bytes
    position: MetalogPosition
    delay_s: float
    key: str = ""


class ReleaseCalls(_Message, frozen=True):
    """worker, client → compute node: release the outcomes held for this holder under these keys;
    without keys, all outcomes held for it. Answered by `Done`.

    Lost: the outcomes may stay held; releasing again is harmless.
    Repeated: never.
    """

    holder: str
    keys: Annotated[tuple[str, ...], msgspec.Meta(max_length=KEYS_LIMIT)]


class AskHolders(_Message, frozen=True):
    """worker, client → compute node: the names of holders of outcomes. The names begin with
    `prefix` and sort after `after`. Answered by `HoldersFound`.

    Lost: the asker gets a `NotReadyError`; nothing was changed.
    Repeated: never.
    """

    prefix: str
    after: str


class AskInvocation(_Message, frozen=True):
    """client → compute node: the state of a recorded invocation; answered by `InvocationFound`,
    after at most `wait_s` seconds if the invocation has not ended.

    Lost: the asker gets a `NotReadyError`; nothing was changed.
    Repeated: never.
    """

    invocation: str
    wait_s: float


class CancelInvocation(_Message, frozen=True):
    """client → compute node: cancel this recorded invocation; answered by `InvocationFound`.

    Lost: the outcome is unknown to the asker; cancelling again is harmless.
    Repeated: never.
    """

    invocation: str


class DeployApp(_Message, frozen=True):
    """client → compute node: deploy these sources (path → text); answered by `Deployed`.

    If `name` is None, the application keeps the name in its code.
    Lost: the outcome is unknown to the asker; deploying again is harmless.
    Repeated: never.
    """

    name: str | None
    owner: str
    sources: Annotated[dict[str, str], msgspec.Meta(max_length=SOURCES_LIMIT)]


class UndeployApp(_Message, frozen=True):
    """client → compute node: remove this application; answered by `Undeployed`.

    Lost: the outcome is unknown to the asker. Undeploying again is harmless, and its answer shows
    whether the application was removed.
    Repeated: never.
    """

    name: str
    owner: str


class Cancel(_Message, frozen=True):
    """asker → asked: stop working on the question with this number, because its answer is not
    needed.

    The question is still answered once. An asker that no longer waits ignores the answer.
    Lost: the link is closed; the asked end cancels all questions sent over the link.
    Repeated: never.
    """


# --- answers


class Appended(_Message, frozen=True):
    """compute node → worker, client: the records are durable at these seqnums.

    Lost: the outcome is unknown to the asker (`AppendOutcomeUnknownError`).
    Repeated: never.
    """

    position: MetalogPosition
    seqnums: tuple[SeqNum, ...]


class RecordsFound(_Message, frozen=True):
    """compute node → worker, client: the requested records; an empty list proves that there are
    none.

    Lost: the asker gets a `NotReadyError`.
    Repeated: never.
    """

    position: MetalogPosition
    records: tuple[RecordValue, ...]


class TailFound(_Message, frozen=True):
    """compute node → worker, client: the requested seqnum. For `LogTail` it is the tail, and for
    `LogFindTime` the first seqnum ordered at the time or later.

    Lost: the asker gets a `NotReadyError`.
    Repeated: never.
    """

    position: MetalogPosition
    seqnum: SeqNum


class PlacesAre(_Message, frozen=True):
    """compute node → client: the places of the requested records, from the first one on. The spans
    may cover only the first records; there is no span if the first record is not ordered yet.

    Lost: the asker gets a `NotReadyError`.
    Repeated: never.
    """

    position: MetalogPosition
    spans: tuple[PlacedSpan, ...]


class ShardFound(_Message, frozen=True):
    """compute node → client: the shard that this compute node writes; None: it writes no shard now.

    Lost: the asker gets a `NotReadyError`.
    Repeated: never.
    """

    position: MetalogPosition
    shard: ShardId | None


class TimeIs(_Message, frozen=True):
    """compute node → worker, client: the time of the log, in seconds since 1970 by the clock of the
    primary sequencer.

    Lost: the asker gets a `NotReadyError`.
    Repeated: never.
    """

    position: MetalogPosition
    time: float


class Done(_Message, frozen=True):
    """asked → asker: the request is done.

    Lost: see the question.
    Repeated: never.
    """

    position: MetalogPosition


class Returned(_Message, frozen=True):
    """worker → compute node → worker, client: the function returned this JSON text.

    Lost: the caller gets a `WorkerCrashedError` or a `CallOutcomeUnknownError`.
    Repeated: never.
    """

    position: MetalogPosition
    result: bytes


class Accepted(_Message, frozen=True):
    """compute node → worker, client: the function will run as this invocation.

    Lost: the outcome is unknown to the asker (`CallOutcomeUnknownError`).
    Repeated: never.
    """

    invocation: str


class Deployed(_Message, frozen=True):
    """compute node → client: this version of the application runs now.

    Lost: the outcome is unknown to the asker; deploying again is harmless.
    Repeated: never.
    """

    app: AppInfo


class Undeployed(_Message, frozen=True):
    """compute node → client: the application takes no new calls; `app` describes the removed
    application.

    Lost: the outcome is unknown to the asker. Undeploying again is harmless, and its answer shows
    whether the application was removed.
    Repeated: never.
    """

    app: AppInfo


class Failed(_Message, frozen=True):
    """asked → asker: the request failed; `kind` names the class of the error.

    Lost: see the question.
    Repeated: never.
    """

    kind: str
    message: str
    attributes: dict[str, Any]
    position: MetalogPosition = 0


class HoldersFound(_Message, frozen=True):
    """compute node → worker, client: the names for which outcomes are held, ascending. An empty
    list proves that there is no further name.

    Lost: see the question.
    Repeated: never.
    """

    position: MetalogPosition
    holders: tuple[str, ...]


class InvocationFound(_Message, frozen=True):
    """compute node → client: the state of a recorded invocation. An empty `function` means that the
    id is unknown.

    Lost: see the question.
    Repeated: never.
    """

    invocation: str
    function: str = ""
    state: str = ""
    outcome: Returned | Failed | None = None


LogQuestion: TypeAlias = (
    LogAppend | LogAppendBatch | LogRead | LogReadNext | LogReadPrev | LogReadRange | LogTail
    | LogNow | LogSetAux | LogFindTime | LogPlaces | LogShard | LogTrim | LogSetRetention
    | LogRetention
)  # fmt: skip
Question: TypeAlias = (
    LogQuestion | CallFunction | SendFunction | ReleaseCalls | AskHolders
    | AskInvocation | CancelInvocation | DeployApp | UndeployApp | Invoke | Load | Unload
    | RunServices | CheckArguments | Ping | Cancel
)  # fmt: skip
ClientQuestion: TypeAlias = (
    LogQuestion | CallFunction | SendFunction | ReleaseCalls | AskHolders
    | AskInvocation | CancelInvocation | DeployApp | UndeployApp | Cancel
)  # fmt: skip
"""All messages that a client may send. Each list in these messages has a limit. The decoder checks
the limit before it decodes the items, so the limits bound the time to decode a message.
"""
Greeting: TypeAlias = Welcome | Ready | ThreadsLeft | MemoryUsedUp | ServicesChanged
LogAnswer: TypeAlias = (
    Appended | RecordsFound | TailFound | PlacesAre | ShardFound | TimeIs | RetentionFound | Done
)  # fmt: skip
"""The answers to questions about logs. Each has the position that the asker has seen then."""
Answer: TypeAlias = (
    LogAnswer
    | Returned | Accepted | HoldersFound | InvocationFound | Loaded | Deployed | Undeployed | Failed
)  # fmt: skip
LinkMessage: TypeAlias = Question | Greeting | Answer


class LinkLostError(NotReadyError):
    """The connection closed before the answer arrived."""


class RevokedError(NotReadyError):
    """The call was revoked before it began, so it was not run."""


# --- errors as values

_ERRORS: Final[dict[str, type[Exception]]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, IndilogError)
} | {kind.__name__: kind for kind in (LinkLostError, RevokedError, ValueError, TypeError)}
_ATTRIBUTES: Final = (
    "what", "size", "limit", "first_seqnum", "seqnum", "next_seqnum", "tags", "errors", "kind",
    "temporary", "last_seqnum",
)  # fmt: skip


def failed(error: Exception, position: MetalogPosition = 0) -> Failed:
    """Return the message that carries `error`, with its attributes, to the asker.

    The other end may not know the error classes of a library. So an error is sent as its nearest
    base class in `indilog.base.errors`.
    """
    kind = next((c.__name__ for c in type(error).__mro__ if c.__name__ in _ERRORS), "IndilogError")
    kept = {n: v for n, v in vars(error).items() if n in _ATTRIBUTES}
    return Failed(kind, str(error), kept, position)


CANCELLED: Final = failed(
    CallOutcomeUnknownError("The caller cancelled the request; it may have had effects.")
)
"""The answer to a cancelled question; every question gets an answer, even a cancelled one."""


def error_from(answer: Failed) -> Exception:
    """Return the error in `answer`; an unknown class becomes `IndilogError`."""
    kind = _ERRORS.get(answer.kind, IndilogError)
    error = kind.__new__(kind)
    error.args = (answer.message,)
    for name in _ATTRIBUTES:
        if name in answer.attributes:
            setattr(error, name, answer.attributes[name])
    return error
