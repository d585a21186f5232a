"""The definition of a workflow: its name, body, types of arguments and result, and code version.

`Flow.workflow` makes a `Definition` for each decorated function. `runner` executes its body, and
starts check arguments against its signature.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Coroutine, Mapping
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any, Final, Protocol

import structlog
from xxhash import xxh3_64

from bokiflow.limits.limit import Limit, WorkflowLimits
from bokiflow.runs.errors import FlowSettingsError, RunIdInUseError
from bokiflow.runs.records import CodeVersion, RunLimit
from bokiflow.runs.rounds import ContinuedAsNew
from bokiflow.runs.run_state import RunState
from bokiflow.workflow import Workflow
from indilog import InvalidArgumentsError
from indilog.sdk import Signature, arguments_text, can_be_in_tag, plain_value

_NAME_BYTES_MAX: Final = 128


class FlowCode(Protocol):
    """The part of a flow that a definition uses (`bokiflow.versions.Versions`)."""

    @property
    def code(self) -> CodeVersion | None:
        """The version of the flow's own code; None: the flow is not deployed."""

    def newest_of(self, workflow: str) -> Definition | None:
        """Return the newest code of a workflow; None: the newest deployment does not have it."""


class Definition:
    """One workflow.

    Attributes:
        name: unique in its flow.
        body: the decorated function.
        limit: how many runs may execute at a time, and how many may begin in an interval; None: no
            limit.
        version: a digest of the body's code. It shows whether a run began with other code.

    Raises:
        FlowSettingsError: the name or a limit is invalid, the body is not async, or its first
            parameter is not the workflow. If type hints name types that are not defined yet, only
            `signature` checks that parameter.
    """

    def __init__(
        self,
        name: str,
        body: Callable[..., Coroutine[Any, Any, Any]],
        limits: WorkflowLimits | None = None,
        *,
        pinned: bool | None = None,
        flow: FlowCode | None = None,
    ) -> None:
        if not can_be_in_tag(name, _NAME_BYTES_MAX):
            raise FlowSettingsError(
                f"A workflow's name must be 1 to {_NAME_BYTES_MAX} bytes of text."
            )
        if not inspect.iscoroutinefunction(body):
            raise FlowSettingsError(f"Workflow {name!r} must be an async function.")
        if not _may_take_workflow(body):
            raise _takes_no_workflow(name)
        self.name = name
        self.body = body
        self.version = version_of(body.__code__)
        self.limit = None if limits is None else Limit(name, body, limits)
        self._flow = flow
        self._pinned = pinned

    @property
    def code(self) -> CodeVersion | None:
        """The deployment of the code; None: the code is not deployed."""
        return None if self._flow is None else self._flow.code

    @cached_property
    def is_pinned(self) -> bool:
        """Whether runs of earlier deployments keep their code.

        The decorator's `pinned` decides. Without it, runs keep their code unless the body calls
        `Workflow.patched`, itself or through functions of its module.
        """
        return not _calls_patched(self.body) if self._pinned is None else self._pinned

    @cached_property
    def signature(self) -> Signature:
        """Types of the arguments and the result. They are evaluated at first use, when all named
        types are defined.

        Raises:
            FlowSettingsError: the first parameter is not the workflow.
            TypeError: as for `Signature`.
        """
        signature = Signature(self.name, self.body, Workflow)
        if not signature.takes_context:
            raise _takes_no_workflow(self.name)
        return signature

    def limit_of(self, arguments: bytes) -> RunLimit | None:
        """Return the limit of a run with these arguments, which are a JSON object.

        Raises:
            InvalidArgumentsError: the arguments give no valid key or priority of the limit.
        """
        if self.limit is None:
            return None
        return self.limit.of(self.signature.arguments(arguments))

    @cached_property
    def _parameters(self) -> list[str]:
        return list(inspect.signature(self.body).parameters)[1:]

    def checked_text(self, given: tuple[object, ...], named: Mapping[str, object]) -> bytes:
        """Return the arguments of a start as a JSON object.

        Raises:
            InvalidArgumentsError: the arguments do not fit the type hints, or have no JSON form.
        """
        text = self.arguments_text(given, named)
        self.signature.arguments(text)
        return text

    def arguments_text(self, given: tuple[object, ...], named: Mapping[str, object]) -> bytes:
        """Return the arguments of a start as a JSON object. Types are not checked.

        Raises:
            InvalidArgumentsError: there are too many arguments, or an argument has no JSON form.
        """
        parameters = self._parameters
        if len(given) > len(parameters):
            raise InvalidArgumentsError(
                f"{self.name} was not started: it takes {len(parameters)} arguments, "
                f"not {len(given)}."
            )
        return arguments_text({**dict(zip(parameters, given, strict=False)), **named})

    async def result_text(self, wf: Workflow, arguments: dict[str, Any]) -> bytes:
        """Run the body and return its result as JSON text.

        Raises:
            ContinuedAsNew: the run continues with a next round, whose arguments fit the type hints.
            InvalidArgumentsError: the arguments of the next round do not fit.
        """
        try:
            result = await self.body(wf, **arguments)
        except ContinuedAsNew as continued:
            continued.arguments = self.checked_text(continued.given, continued.named)
            following = self._following(continued.arguments)
            continued.version, continued.code = following.version, following.code
            raise
        return self.signature.result_text(result)

    def _following(self, arguments: bytes) -> Definition:
        """Return the code for a round with these arguments: the newest code if it takes them, else
        this code.
        """
        newest = None if self._flow is None else self._flow.newest_of(self.name)
        if newest is None:
            return self
        try:
            newest.signature.arguments(arguments)
        except (InvalidArgumentsError, FlowSettingsError, TypeError):
            return self
        return newest


def check_workflow(id: str, workflow: str, begun: str, advice: str = "") -> None:  # noqa: A002
    """Check that a run that began with workflow `begun` is a run of `workflow`.

    Raises:
        RunIdInUseError: the run is of another workflow. The message ends with `advice`.
    """
    if begun != workflow:
        raise RunIdInUseError(
            f"Run {id!r} is one of workflow {begun!r}, not of {workflow!r}{advice}."
        )


def check_same_run(id: str, definition: Definition, arguments: bytes, run: RunState) -> None:  # noqa: A002
    """Check that a start with the id of an existing run is a start of the same workflow.

    A start with other arguments is accepted, because it may be a repetition; a warning is logged.
    The arguments of a later round differ from those of the start, so they are not compared.

    Raises:
        RunIdInUseError: the run is of another workflow.
    """
    begun = run.started
    assert begun is not None, "a run that was read has begun"
    check_workflow(id, definition.name, begun.workflow, "; choose another id")
    if run.round > 1:
        return
    if arguments != begun.arguments and plain_value(arguments) != plain_value(begun.arguments):
        structlog.get_logger().warning(
            "start repeated with other arguments; the run keeps its own",
            run=id,
            workflow=definition.name,
        )


def _may_take_workflow(body: Callable[..., object]) -> bool:
    """Tell whether the first parameter is the workflow, or has a type hint that is not defined
    yet.
    """
    first = next(iter(inspect.signature(body).parameters.values()), None)
    if first is None or first.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return False
    if first.name == "ctx":
        return True
    try:
        hint = typing.get_type_hints(body).get(first.name)
    except (NameError, TypeError, AttributeError):
        return first.annotation is not inspect.Parameter.empty
    return hint is Workflow


def _takes_no_workflow(name: str) -> FlowSettingsError:
    return FlowSettingsError(f"Workflow {name!r} must take `wf: bokiflow.Workflow` first.")


def _calls_patched(body: Callable[..., object]) -> bool:
    """Tell whether a function calls `Workflow.patched`: itself, or through functions of its module
    that its code names.
    """
    left, seen = [body], {body}
    while left:
        function = left.pop()
        names = _names_in(function.__code__)
        if Workflow.patched.__name__ in names:
            return True
        for name in names:
            named = function.__globals__.get(name)
            if not isinstance(named, FunctionType) or named.__module__ != body.__module__:
                continue
            if named not in seen:
                left.append(named)
                seen.add(named)
    return False


def _names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function, and in functions inside it."""
    inner = (_names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*inner)


def version_of(code: CodeType) -> str:
    """Return a digest of the code. It also depends on the Python version."""
    digest = xxh3_64()
    _add(digest, code)
    return digest.hexdigest()


def _add(digest: xxh3_64, code: CodeType) -> None:
    digest.update(code.co_code)
    digest.update(repr((code.co_names, code.co_varnames)).encode())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add(digest, constant)
        elif not isinstance(constant, frozenset):  # their order differs between processes
            digest.update(repr(constant).encode())
