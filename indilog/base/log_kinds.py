"""Kinds of log: how a log is ordered and stored (docs/KINDS.md).

A log has one kind at a time. Compute nodes route a call by the kind of its log
(`indilog_compute.log_kinds`).
"""

from __future__ import annotations

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


class LogInfo(msgspec.Struct, frozen=True):
    """A log that was created.

    Attributes:
        log: its name.
        kind: its present kind.
        created_at: when it was created, seconds since 1970 by the time of the log.
    """

    log: str
    kind: LogKind
    created_at: float


def check_kind(kind: str) -> LogKind:
    """Return `kind` if there is such a kind of log.

    Raises:
        ValueError: there is none; the message lists all.
    """
    for known in LOG_KINDS:
        if kind == known:
            return known
    raise ValueError(f"A log's kind is one of {', '.join(LOG_KINDS)}, not {kind!r}.")
