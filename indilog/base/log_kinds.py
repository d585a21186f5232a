"""Kinds of log: how a log is ordered and stored (docs/KINDS.md).

A log has one kind at a time. Compute nodes route a call by the kind of its log
(`indilog_compute.log_kinds`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, get_args

import msgspec

LogKind: TypeAlias = Literal["shared", "object-store", "order-first", "owned"]
LOG_KINDS: Final[tuple[LogKind, ...]] = get_args(LogKind)
SHARED: Final[LogKind] = "shared"
"""The sequencers order all shared logs in one order. A log that was never created explicitly has
this kind.
"""
OBJECT_STORE: Final[LogKind] = "object-store"
"""An order of its own, in the objects of a store."""
ORDER_FIRST: Final[LogKind] = "order-first"
"""An order of its own, in write-once cells of storage nodes."""
OWNED: Final[LogKind] = "owned"
"""An order of its own, in write-once cells of storage nodes. One compute node at a time appends,
with a quorum of replicas.
"""

STRIPES: Final = 16
"""Stripes of an `object-store` log if its creator does not say otherwise."""
STRIPES_MAX: Final[Mapping[LogKind, int]] = {OBJECT_STORE: 1_000, ORDER_FIRST: 16}
"""Stripes of a log, at most, by kind; logs of other kinds have none."""


class LogInfo(msgspec.Struct, frozen=True):
    """A log that was created.

    Attributes:
        log: its name.
        kind: its present kind.
        created_at: when it was created, seconds since 1970 by the time of the log.
        stripes: over how many chains of storage nodes (`order-first`) or folders of the store
            (`object-store`) its new records are spread; 0: the kind has no stripes, or the platform
            is too old to say.
    """

    log: str
    kind: LogKind
    created_at: float
    stripes: int = 0


def check_kind(kind: str) -> LogKind:
    """Return `kind` if there is such a kind of log.

    Raises:
        ValueError: there is none; the message lists all.
    """
    for known in LOG_KINDS:
        if kind == known:
            return known
    raise ValueError(f"A log's kind is one of {', '.join(LOG_KINDS)}, not {kind!r}.")


def check_stripes(kind: LogKind, stripes: int | None) -> None:
    """Check the number of stripes that a log of a kind shall have; None: the platform chooses it.

    Raises:
        ValueError: the kind has no stripes, or not so many.
    """
    if stripes is None:
        return
    if (most := STRIPES_MAX.get(kind)) is None:
        having = " and ".join(STRIPES_MAX)
        raise ValueError(f"A log of kind {kind} has no stripes; logs of kind {having} have.")
    if not 1 <= stripes <= most:
        raise ValueError(f"A log of kind {kind} has 1 to {most:,} stripes, not {stripes:,}.")


def kind_and_stripes(kind: str, stripes: int | None) -> dict[str, object]:
    """Return the checked fields of a request that creates or switches a log.

    Raises:
        ValueError: there is no such kind, or it cannot have so many stripes.
    """
    check_stripes(wanted := check_kind(kind), stripes)
    return {"kind": wanted} if stripes is None else {"kind": wanted, "stripes": stripes}
