"""Calls the body of a step, and converts its result to JSON text and back.

A sync body runs in a thread, so it does not block other runs. `Workflow`, `calls` and
`transactions` describe functions with `Body`.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from bokiflow.operations.children import ChildWorkflow
from bokiflow.runs import waiting
from bokiflow.runs.errors import FlowSettingsError
from indilog import Context
from indilog.sdk import ResultType, plain_value

NAME_BYTES_MAX: Final = 200


class Body:
    """A step's body, with its signature.

    Attributes:
        name: name of the step in the log.
        is_async: whether it is a coroutine function; if not, it runs in a thread.
        takes_context: whether its first parameter is the function's context.
    """

    __slots__ = ("_call", "_is_any", "_type", "is_async", "name", "takes_context")

    def __init__(self, call: Callable[..., Any], name: str | None) -> None:
        check_function(call)
        self._call = call
        self.name = name or getattr(call, "__name__", "") or type(call).__name__
        if len(self.name.encode()) > NAME_BYTES_MAX:
            raise FlowSettingsError(f"A step's name is at most {NAME_BYTES_MAX} bytes.")
        hints = _hints(call)
        hint = hints.get("return", Any)
        self._is_any = hint is Any
        self._type = ResultType(f"Step {self.name!r}", hint)
        self.is_async = inspect.iscoroutinefunction(
            inspect.unwrap(call)
        )  # unwrapped, so that a partial works, too
        self.takes_context = _takes_context(call, hints)

    def of(self, call: Callable[..., Any]) -> Body:
        """Return this description with another function object that has the same code."""
        if call is self._call:
            return self
        other = object.__new__(Body)
        other._call, other.name = call, self.name
        other._is_any, other._type = self._is_any, self._type
        other.is_async, other.takes_context = self.is_async, self.takes_context
        return other

    async def run(self, arguments: tuple[object, ...]) -> object:
        """Run the body and return its result. A sync body runs in a thread."""
        if self.is_async:
            value = self._call(*arguments)
        else:
            value = await waiting.run_in_thread(partial(self._call, *arguments))
        return await value if inspect.isawaitable(value) else value

    def text(self, value: object) -> bytes:
        """Return a result as JSON text.

        Raises:
            FunctionFailedError: the result does not fit the return type, or has no JSON form.
        """
        return self._type.text(value)

    def result(self, text: bytes) -> object:
        """Return the value of JSON text."""
        return plain_value(text) if self._is_any else self._type.value(text)


def check_function(call: object) -> None:
    """Raise for an object that cannot be the body of a step.

    Raises:
        FlowSettingsError: the object is a coroutine or a workflow, or is not callable.
    """
    if inspect.iscoroutine(call):
        call.close()  # else Python warns that it was never awaited
        name = call.__name__
        raise FlowSettingsError(
            f"Give the function, then its arguments: {name}, ... instead of {name}(...)."
        )
    if isinstance(call, ChildWorkflow):
        raise FlowSettingsError(f"{call.name} is a workflow: use wf.run({call.name}, ...).")
    if not callable(call):
        raise FlowSettingsError(
            f"Give a function, then its arguments, not {type(call).__name__} {call!r:.80}."
        )


def _hints(call: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(inspect.unwrap(call), include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}  # a partial, a builtin, or names only for type checkers: any JSON is accepted


def _takes_context(call: Callable[..., Any], hints: dict[str, Any]) -> bool:
    try:
        parameters = list(inspect.signature(call).parameters)
    except (ValueError, TypeError):
        return False
    return bool(parameters) and (parameters[0] == "ctx" or hints.get(parameters[0]) is Context)
