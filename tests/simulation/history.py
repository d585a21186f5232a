"""The operations of all callers with their outcomes: the evidence of the checkers.

Outcomes of an operation:

- *ok*: it has a value.
- *failed*: the platform answered that nothing was done.
- *unknown*: the caller's process died, or the platform answered that the outcome is unknown.
- *lost*: a read of a record that no replica can show.
- *trimmed*: a read of trimmed records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from indilog.base.log import Record

Outcome: TypeAlias = Literal["ok", "failed", "unknown", "lost", "trimmed"]


APPENDS: Final = frozenset({"append", "append_batch", "append_if"})
CONDITIONAL: Final = "append_if"
EVER: Final = 1 << 62
"""A step later than all others."""


BATCH_HEADER_BYTES: Final = 58
"""Bytes of the header of a batch (docs/FORMATS.md)."""


class Moment(NamedTuple):
    """An instant: the step of the world, and the simulated second."""

    step: float
    time_s: float


AT_LAST: Final = Moment(EVER, EVER)


class Seen(NamedTuple):
    """A record as a caller saw it."""

    seqnum: int
    data: bytes
    tags: tuple[str, ...]


def seen(record: Record) -> Seen:
    """Return the fields of a record that the checkers compare."""
    return Seen(record.seqnum, record.data, tuple(map(str, record.tags)))


@dataclasses.dataclass(slots=True)
class Operation:
    """One call.

    Attributes:
        number: unique in its history.
        session: whose call it is; calls of one session follow one another unless `overlapping`.
        kind: the method of `Log`, with `wait` for a read that waits.
        invoked, returned: steps of the world, which order all that happened.
        position_before, position_after: the session's metalog position.
        fresh: whether the read must reflect all that any session has seen before.
        entries: the records of an append.
        age_s, size_bytes: of a retention policy.
        after: of a conditional append, the last seqnum with its tag that it names; None: none.
        too_large: whether they are more than the limits allow.
        value: of an ok operation: seqnums, records, or a number; of a lost one, the seqnums [first,
            end) that the error names.
        note: the text of an error.
    """

    number: int
    session: int
    engine: str
    kind: str
    log: str
    tag: str | None = None
    bound: int = 0
    limit: int = 0
    wait_s: float = 0.0
    fresh: bool = False
    time_s: float = 0.0
    entries: tuple[tuple[bytes, tuple[str, ...]], ...] = ()
    after: int | None = None
    too_large: bool = False
    age_s: float | None = None
    size_bytes: int | None = None
    overlapping: bool = False
    invoked: int = 0
    returned: int | None = None
    invoked_s: float = 0.0
    returned_s: float = 0.0
    position_before: int = 0
    position_after: int = 0
    outcome: Outcome = "unknown"
    value: Any = None
    note: str = ""

    @property
    def end(self) -> Moment:
        """The second in which it returned, if it has."""
        return AT_LAST if self.returned is None else Moment(self.returned, self.returned_s)

    def describe(self) -> str:
        """Return the operation and its outcome in one line."""
        arguments = [repr(part) for part in (self.tag, self.bound or None) if part is not None]
        if self.fresh:
            arguments.append("fresh")
        if self.kind == "set_retention":
            arguments = [f"age_s={self.age_s}", f"size_bytes={self.size_bytes}"]
        if self.entries:
            arguments = [b"|".join(data[:24] for data, _ in self.entries).decode()]
        if self.kind == CONDITIONAL:
            arguments.append(f"after {self.tag} {self.after}")
        return (
            f"#{self.number} session {self.session} at {self.engine}, {self.log}: "
            f"{self.kind}({', '.join(arguments)}) {self.outcome} {self.value!r} {self.note}"
            f" [{self.invoked}, {self.returned}] positions {self.position_before}"
            f" to {self.position_after}"
        )


class Violation(NamedTuple):
    """A broken guarantee: which check found it, and the contradiction."""

    check: str
    what: str


class Evidence(NamedTuple):
    """The evidence of a run after healing.

    Attributes:
        operations: the history, in the order of invocation.
        records: what the log holds or has held, by seqnum. The sources are storage nodes after the
            run, acknowledgements, and reads.
        unknown: what a replica does not show, of the shards that it keeps.
        shown: the seqnums that storage nodes show after the run.
        tails: the log's tail after each metalog position, from the entries that were published.
        scans: per engine and log, what a scan through the public interface returned.
        subscribed: per engine and log, what a subscription from the beginning has shown.
        stamps: when storage nodes say that each record was ordered, seconds since 1970.
        lost: the seqnums that all replicas may have lost.
    """

    operations: list[Operation]
    records: dict[int, tuple[str, bytes, tuple[str, ...]]]
    tails: list[int]
    scans: dict[tuple[str, str], list[Seen]]
    shown: frozenset[int]
    unknown: tuple[tuple[str, int], ...] = ()
    subscribed: Mapping[tuple[str, str], Sequence[Seen]] = MappingProxyType({})
    stamps: Mapping[int, float] = MappingProxyType({})
    lost: frozenset[int] = frozenset()
    reported_losses: Mapping[tuple[str, str], Sequence[tuple[int, int]]] = MappingProxyType({})
    """Per engine and log, the ranges that a scan reported as lost."""
    ordered_at: Sequence[float] = ()
    """The stamp of each seqnum, from the committed entries, seconds since 1970."""


def retained_bytes(log: str, data: bytes, tags: tuple[str, ...]) -> int:
    """Return the bytes of a record that a retention policy counts: its data and its names."""
    return len(data) + len(log.encode()) + sum(2 + len(tag.encode()) for tag in tags)


def stored_bytes(log: str, data: bytes, tags: tuple[str, ...]) -> int:
    """Return the bytes of a record in its batch."""
    return retained_bytes(log, data, tags) + 8 * (1 + len(tags)) + 13
