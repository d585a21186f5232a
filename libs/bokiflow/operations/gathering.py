"""Runs concurrent branches of a workflow: `await wf.gather(...)`.

Each branch numbers its own operations, so the numbers do not depend on the order of execution.
`Operations.gather` calls `gather`.
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
from bokiflow.runs.unawaited_operations import close_unbegun

_ValueT = TypeVar("_ValueT")
BRANCHES_MAX: Final = 10_000
AT_ONCE: Final = 64
"""Default for the number of branches of a `gather` that run concurrently."""


@dataclass(frozen=True, slots=True)
class _Raised:
    """The error that a branch raised. It is distinct from an error object that a branch returns."""

    error: Exception


async def gather(
    execution: Execution,
    number: str,
    branches: Sequence[Coroutine[Any, Any, _ValueT]],
    at_once: int,
) -> list[_ValueT]:
    """Return the results of all branches, in the order of `branches`.

    Every branch runs to its end, even if another branch fails. So the set of branches that take
    effect does not depend on timing.

    Raises:
        Exception: the error of the first branch that failed; a `Cancelled` of any branch has
            priority.
        FlowSettingsError: there are too many branches, or `at_once` is less than 1.
    """
    if len(branches) > BRANCHES_MAX or at_once < 1:
        for branch in branches:
            branch.close()  # otherwise Python warns that the branch was never awaited
        raise FlowSettingsError(
            f"gather takes at most {BRANCHES_MAX:,} branches, and at_once must be 1 or more, "
            f"not {len(branches):,} and {at_once}."
        )
    parent = execution.branch
    contexts = []
    for place in range(1, len(branches) + 1):
        context = copy_context()
        context.run(BRANCH.set, Branch(execution, f"{number}.{place}.", parent))
        contexts.append(context)
    if waiting.has_loop():
        ended = await _at_once(execution, branches, contexts, at_once)
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
    execution: Execution,
    branches: Sequence[Coroutine[Any, Any, _ValueT]],
    contexts: Sequence[Context],
    at_once: int,
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
    finally:  # when the execution stops, all branches are cancelled
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:  # also if the task of `gather` is cancelled once more
            if close_unbegun(branches):
                execution.asked.close_unbegun()


async def _one(branch: Coroutine[Any, Any, _ValueT], context: Context) -> _ValueT | _Raised:
    """Run a branch without an event loop. Branches then run one after the other."""
    before = BRANCH.set(context[BRANCH])
    try:
        return await branch
    except Exception as error:  # noqa: BLE001 - the branch's outcome
        return _Raised(error)
    finally:
        BRANCH.reset(before)
