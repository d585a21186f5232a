"""Queries: read-only functions over a run, for people and programs (`Flow.query`).

A query is answered by a replay: the workflow runs again against the outcomes in the log, up to the
first operation without an outcome. Nothing is executed or appended. So any process can answer, even
for a run that has ended, or whose executor hangs.

The query runs in a thread and has a time limit, so a query that does not end blocks no other work.
`Handle.query` and `inspection` ask queries; `replay_check` replays the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Final

from bokiflow.definition import Definition
from bokiflow.replay_check import replay
from bokiflow.runs import waiting
from bokiflow.runs.errors import FlowSettingsError, QueryFailedError
from bokiflow.runs.run_state import RunState
from bokiflow.runs.states import State
from indilog import FunctionFailedError, Log
from indilog.sdk import Logs, Signature, arguments_text, can_be_in_tag

_NAME_BYTES_MAX: Final = 128
_THREADS: Final = 4


class QueryLimits:
    """The limits of the queries of one executor.

    Attributes:
        timeout_s: seconds after which a query fails.
        threads: the threads of the queries.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.threads = waiting.EndableThreads(_THREADS, "query")


class RunView:
    """A run, as a query sees it.

    Attributes:
        id: the run's id.
        workflow: name of its workflow.
        state: its state.
        round: number of its round, from 1.
        arguments: the arguments of its workflow, by name.
        vars: the values that the workflow has put into `Workflow.vars`.
    """

    def __init__(
        self,
        id: str,  # noqa: A002
        run: RunState,
        arguments: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> None:
        assert run.started is not None, "only a run that has begun is queried"
        assert run.state is not None, "a run that has begun has a state"
        self.id = id
        self.workflow = run.started.workflow
        self.state: State = run.state
        self.round = run.round
        self.arguments = MappingProxyType(dict(arguments))
        self.vars = MappingProxyType(dict(values))


class Query:
    """A query function of a flow.

    Attributes:
        name: unique among the queries of its flow.

    Raises:
        FlowSettingsError: the function is async, or its first parameter is not a `RunView`.
    """

    def __init__(self, body: Callable[..., Any]) -> None:
        self.name = body.__name__
        self._body = body
        if not can_be_in_tag(self.name, _NAME_BYTES_MAX):
            raise FlowSettingsError(f"A query's name must be 1 to {_NAME_BYTES_MAX} bytes of text.")
        if inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body):
            raise FlowSettingsError(
                f"Query {self.name!r} must be an ordinary function, because it only reads."
            )
        if not inspect.signature(body).parameters:
            raise self._takes_no_view()

    @cached_property
    def signature(self) -> Signature:
        """Types of the arguments and the result. They are evaluated at first use.

        Raises:
            FlowSettingsError: the first parameter is not a `RunView`.
        """
        signature = Signature(self.name, self._body, RunView)
        if not signature.takes_context:
            raise self._takes_no_view()
        return signature

    def _takes_no_view(self) -> FlowSettingsError:
        return FlowSettingsError(f"Query {self.name!r} must take `view: bokiflow.RunView` first.")

    async def answer(
        self,
        definition: Definition,
        log: Log,
        logs: Logs,
        run: tuple[str, RunState],
        arguments: Mapping[str, object],
        limits: QueryLimits,
    ) -> bytes:
        """Return the answer for a run as JSON text.

        Args:
            definition: the workflow of the run.
            log: log of the run; it is not written.
            logs: source of logs for the workflow.
            run: id and state of the run, which has begun.
            arguments: arguments of the query.
            limits: limits of the replay and the query.

        Raises:
            InvalidArgumentsError: the arguments do not fit the query.
            QueryFailedError: the code does not match the run's decided operations, the query
                raised, or the time limit is reached.
        """
        given = self.signature.arguments(arguments_text(dict(arguments)))
        late = (
            f"Query {self.name!r} of run {run[0]!r} did not answer within {limits.timeout_s:g} s; "
            "make it quicker, or give it more time: Flow(query_timeout=...)."
        )
        answer = self._answer(definition, log, logs, run, given, limits.threads)
        try:
            return await waiting.run_within(answer, limits.timeout_s, late)
        except TimeoutError as error:
            raise QueryFailedError(str(error)) from error

    async def _answer(
        self,
        definition: Definition,
        log: Log,
        logs: Logs,
        run: tuple[str, RunState],
        given: Mapping[str, Any],
        threads: waiting.EndableThreads,
    ) -> bytes:
        id_, state = run
        async with replay(definition, log, logs, id_, state) as replayed:
            if isinstance(replayed, str):
                raise QueryFailedError(f"Run {id_!r} cannot be queried: {replayed}")
            view = RunView(id_, state, replayed.arguments, replayed.workflow.vars)
            try:
                return await threads.run(partial(self._text, view, given))
            except FunctionFailedError as error:
                raise QueryFailedError(f"Query {self.name!r} of run {id_!r}: {error}") from error
            except Exception as error:
                raise QueryFailedError(
                    f"Query {self.name!r} of run {id_!r} raised {type(error).__name__}: {error}"
                ) from error

    def _text(self, view: RunView, given: Mapping[str, Any]) -> bytes:
        return self.signature.result_text(self._body(view, **given))
