"""Resolves the futures of callers with their outcomes (ARCHITECTURE 5).

A cancelled future is skipped. `NodeShell` and `indilog_compute.local_log` use this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from indilog.roles.role import AnswerAppends


def resolve_all(waiters: Iterable[asyncio.Future[None]]) -> None:
    """Resolve all of these futures with None."""
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def resolve_ordered(appended: AnswerAppends) -> None:
    """Give the callers of appends their seqnums, except the callers that were cancelled."""
    position = appended.position
    for seqnum, waiter in enumerate(appended.waiters, appended.first):
        if waiter is not None:
            try:
                waiter.set_result((seqnum, position))  # type: ignore[attr-defined]
            except asyncio.InvalidStateError:
                assert waiter.cancelled(), "an append has one outcome"  # type: ignore[attr-defined]


def resolve_each(waiters: Iterable[object | None], outcome: object) -> None:
    """Give the same outcome to each of these futures."""
    for waiter in waiters:
        if waiter is not None:
            resolve(waiter, outcome)


def resolve(waiter: object, outcome: object) -> None:
    """Give one future its value, or the exception to raise; a cancelled future is skipped."""
    assert isinstance(waiter, asyncio.Future)
    if waiter.done():
        return
    if isinstance(outcome, BaseException):
        waiter.set_exception(outcome)
    else:
        waiter.set_result(outcome)
