"""Telling callers who wait for a future (ARCHITECTURE 5)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable


def resolve_all(waiters: Iterable[asyncio.Future[None]]) -> None:
    """Tell all of them that it is done."""
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)


def resolve_each(waiters: Iterable[object | None], outcome: object) -> None:
    """Tell each of them the same."""
    for waiter in waiters:
        if waiter is not None:
            resolve(waiter, outcome)


def resolve(waiter: object, outcome: object) -> None:
    """Tell one its value, or the exception that it raises; one that gave up is passed over."""
    assert isinstance(waiter, asyncio.Future)
    if waiter.done():
        return
    if isinstance(outcome, BaseException):
        waiter.set_exception(outcome)
    else:
        waiter.set_result(outcome)
