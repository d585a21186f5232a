"""Tells the process that runs deployed code that this code ran out of memory.

Code that handles an error of deployed code calls `note_error`: the worker for imports, services,
tasks and threads, a library such as BokiFlow for steps. The listener of a worker process checks
whether the memory stays in use; if so, the compute node replaces the worker. Other processes have
no listener. The worker itself looks at the errors of its calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_LISTENERS: Final[list[Callable[[], object]]] = []


def listen(listener: Callable[[], object]) -> None:
    """Call `listener` after each noted `MemoryError`, in the thread that notes it."""
    _LISTENERS.append(listener)


def is_memory_error(error: BaseException) -> bool:
    """Whether an error is a `MemoryError`, or was raised because of one."""
    seen = set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, MemoryError):
            return True
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return False


def note_error(error: BaseException) -> None:
    """Notify the process if `is_memory_error`.

    A library calls this with each error of deployed code that it handles itself. It may be called
    several times with one error.
    """
    if is_memory_error(error):
        for listener in _LISTENERS:
            listener()
