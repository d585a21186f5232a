"""Compensates a failed or cancelled workflow (a saga): functions undo steps, and child runs are
cancelled.

Compensations run one after the other, in the reverse order of the operations' numbers. Each
compensation is a separate operation: its outcome is decided once, and a crash does not skip it.
`runner` and `replay_check` run workflows through `run_compensated`. The operations of a workflow
register its compensations.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, NamedTuple

from bokiflow.runs.errors import CompensationFailedError
from bokiflow.runs.execution import UNDO, Execution, OperationOutcome, failure_from
from bokiflow.runs.records import RecordedFailure
from bokiflow.runs.rounds import ContinuedAsNew

COMPENSATE: Final = "compensate"
COMPENSATION_RETRIES: Final = 10


class _Undo(NamedTuple):
    name: str
    kind: str
    produce: Callable[[str], Awaitable[OperationOutcome]]


class Compensations:
    """The compensations that one execution has registered.

    Attributes:
        execution: the execution that registered them.
    """

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self._undos: dict[str, _Undo] = {}

    def add(
        self,
        number: str,
        name: str,
        kind: str,
        produce: Callable[[str], Awaitable[OperationOutcome]],
    ) -> None:
        """Register the compensation of the operation `number`.

        Args:
            number: number of the operation to undo.
            name: name of the compensation.
            kind: kind of the compensation.
            produce: function that undoes the operation; its argument is the number of the
                compensation.
        """
        assert number not in self._undos, "an operation is undone once"
        self._undos[number] = _Undo(name, kind, produce)

    def must_not_run(self, raised: Exception) -> bool:
        """Tell whether no compensation may run, because the code does not match decided steps."""
        return self.execution.has_left_out(raised, self._undos)

    async def run(self) -> list[RecordedFailure]:
        """Run all compensations; return their failures."""
        self.execution.suppress_cancellation()
        failures = []
        for number in sorted(self._undos, key=_path_of, reverse=True):
            failure = await self._compensate(number, self._undos.pop(number))
            if failure is not None:
                failures.append(RecordedFailure(failure.kind, f"{number}: {failure.message}"))
        assert not self._undos, "each compensation ran"
        return failures

    async def _compensate(self, number: str, undo: _Undo) -> RecordedFailure | None:
        undo_number = number + UNDO

        async def produce() -> OperationOutcome:
            try:
                return await undo.produce(undo_number)
            except Exception as error:  # noqa: BLE001 - the other compensations still run
                return OperationOutcome(b"", failure_from(error))

        decided = await self.execution.decide(
            undo_number, undo.name, undo.kind, produce, is_cancellable=False
        )
        return decided.failure


def _path_of(number: str) -> tuple[int, ...]:
    return tuple(map(int, number.split(".")))


async def run_compensated(compensations: Compensations, body: Coroutine[Any, Any, bytes]) -> bytes:
    """Run a workflow's body. If the body raises, run its compensations and raise the error again.

    Raises:
        CompensationFailedError: all compensations ran, and some failed.
        UnfinishedOperationError: the body returned before its operations were finished.
        ContinuedAsNew: the body ended its round; no compensation ran.
    """
    execution = compensations.execution
    continued: ContinuedAsNew | None = None
    try:
        try:
            result = await body
        except ContinuedAsNew as asked:  # the round ends without a failure
            continued, result = asked, b""
        await execution.asked.run_until_idle()
        execution.check_finished()
    except Exception as error:
        await execution.asked.run_until_idle()
        if compensations.must_not_run(error):
            raise
        failures = await compensations.run()
        if failures:
            raise CompensationFailedError(
                error, [f"{f.kind} at {f.message}" for f in failures]
            ) from error
        raise
    if continued is not None:
        raise continued
    return result
