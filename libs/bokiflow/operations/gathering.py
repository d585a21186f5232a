"""Branches of a workflow that run at the same time: `await wf.gather(...)`.

Operations of a branch are numbered by their place in it, so what runs first changes no number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from bokiflow.runs import waiting
from bokiflow.runs.errors import Cancelled, FlowSettingsError
from bokiflow.runs.execution import BRANCH, Branch, Execution

_ValueT = TypeVar("_ValueT")
BRANCHES_MAX: Final = 10_000
AT_ONCE: Final = 64
"""Branches of one `gather` that run at once, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class _Raised:
    """What a branch raised; one may also return an error."""

    error: Exception


async def gather(
    execution: Execution,
    number: str,
    branches: Sequence[Coroutine[Any, Any, _ValueT]],
    at_once: int,
) -> list[_ValueT]:
    """Return the results of all branches, in their order.

    Every branch comes to its end, also when another one fails: so which of them have an effect
    does not depend on chance.

    Raises:
        Exception: what the first of them raised that failed; a cancellation before all else.
        FlowSettingsError: too many branches, or none of them at once.
    """
    if len(branches) > BRANCHES_MAX or at_once < 1:
        for branch in branches:
            branch.close()  # else Python warns that nobody awaited it
        raise FlowSettingsError(
            f"gather takes {BRANCHES_MAX:,} branches at most, and at_once is 1 or more, "
            f"not {len(branches):,} and {at_once}."
        )
    parent = execution.branch
    contexts = []
    for place in range(1, len(branches) + 1):
        context = copy_context()
        context.run(BRANCH.set, Branch(execution, f"{number}.{place}.", parent))
        contexts.append(context)
    if waiting.has_loop():
        ended = await _at_once(branches, contexts, at_once)
    else:
        ended = [await _one(branch, c) for branch, c in zip(branches, contexts, strict=True)]
    errors = [value.error for value in ended if isinstance(value, _Raised)]
    for error in errors:
        if isinstance(error, Cancelled):
            raise error
    for error in errors:
        raise error
    return [value for value in ended if not isinstance(value, _Raised)]


async def _at_once(
    branches: Sequence[Coroutine[Any, Any, _ValueT]], contexts: Sequence[Context], at_once: int
) -> list[_ValueT | _Raised]:
    slots = asyncio.Semaphore(at_once)

    async def in_turn(branch: Coroutine[Any, Any, _ValueT]) -> _ValueT | _Raised:
        async with slots:
            try:
                return await branch
            except Exception as error:  # noqa: BLE001 - the branch's outcome
                return _Raised(error)

    tasks = [
        asyncio.create_task(in_turn(branch), context=context)
        for branch, context in zip(branches, contexts, strict=True)
    ]
    try:
        return await asyncio.gather(*tasks)
    finally:  # when the execution stops, none of them goes on
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for branch in branches:
            branch.close()


async def _one(branch: Coroutine[Any, Any, _ValueT], context: Context) -> _ValueT | _Raised:
    """Run a branch where no event loop runs several at once."""
    before = BRANCH.set(context[BRANCH])
    try:
        return await branch
    except Exception as error:  # noqa: BLE001 - the branch's outcome
        return _Raised(error)
    finally:
        BRANCH.reset(before)
