"""Runs transactions in workflows, committed exactly once: `await wf.transact(store, body)`.

The transaction has the operation's key as its id, so only the first commit takes effect
(`Store.transact`). The store keeps the id until the run has recorded the outcome, even if the store
is garbage-collected meanwhile.

If the body raises, its failure is committed without its writes. Otherwise a stalled execution could
commit writes after the failure was decided. For the same reason, a cancellation of the run is
committed, too. It takes effect only if no earlier execution has committed the writes.
`Operations.transact` calls `transact`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bokiflow.operations.body import Body
from bokiflow.runs import waiting
from bokiflow.runs.execution import Execution, OperationOutcome, failure_from, raise_failure
from bokiflow.runs.keys import short_key
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import RecordedFailure
from bokiflow.runs.run_log import is_transient
from indilog import ConflictError, IndilogError
from indilog.sdk import note_error

if TYPE_CHECKING:
    from bokistore import Store, Transaction

TRANSACTION: Final = "transaction"
_TRIES: Final = 12
_PAUSE_S_MIN: Final = 0.01
_PAUSE_S_MAX: Final = 5.0
_ID_BYTES_MAX: Final = 250


class _Recorded(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a transaction, or the failure of its body, committed with its writes."""

    result: Any = None
    failure: RecordedFailure | None = None
    is_cancelled: bool = False


async def transact(
    execution: Execution,
    number: str,
    store: Store,
    body: Callable[[Transaction], Awaitable[Any]],
    known: Body,
) -> Any:  # noqa: ANN401 - of the body's type
    """See `Operations.transact`; `known` describes `body`."""
    txn_id = short_key(execution.key(number), _ID_BYTES_MAX)
    errors: list[BaseException] = []
    held: list[str] = []

    async def wrote(txn: Transaction) -> Any:  # noqa: ANN401
        value = await body(txn)
        return msgspec.to_builtins(_Recorded(msgspec.json.decode(known.text(value))))

    async def failed(_: Transaction) -> Any:  # noqa: ANN401
        return msgspec.to_builtins(_Recorded(failure=failure_from(errors[-1])))

    async def cancelled(_: Transaction) -> Any:  # noqa: ANN401
        failure = execution.cancelled_at(number, known.name, TRANSACTION)
        return msgspec.to_builtins(_Recorded(failure=failure, is_cancelled=True))

    async def committed() -> OperationOutcome:
        try:
            attempt = cancelled if execution.is_cancel_asked else wrote
            plain = await _transact_with_retry(store, attempt, txn_id)
        except Exception as error:  # noqa: BLE001 - each error is an outcome
            note_error(error)
            errors.append(error)
            # A concurrent execution may still commit the writes. The log decides which of the two
            # commits comes first.
            plain = await _transact_with_retry(store, failed, txn_id)
        held.append(txn_id)
        recorded = msgspec.convert(plain, _Recorded)
        result = msgspec.json.encode(recorded.result)
        return OperationOutcome(result, recorded.failure, recorded.is_cancelled)

    decided = await execution.decide(
        number, known.name, TRANSACTION, committed, may_wait=True, is_cancellable=False
    )
    if held:  # once the outcome is durable, no replay needs the id, so the store may forget it
        execution.call_when_durable(number, partial(store.release, *held))
    raise_failure(decided, errors[-1] if errors else None)
    return known.result(decided.result)


async def _transact_with_retry(
    store: Store, body: Callable[[Transaction], Awaitable[Any]], txn_id: str
) -> Any:  # noqa: ANN401
    """Commit a transaction, with retries. Its id makes repeated commits idempotent."""
    pause_s = _PAUSE_S_MIN
    conflict: ConflictError | None = None
    for tries in range(_TRIES):
        if tries:
            await waiting.pause(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S_MAX)
        try:
            return await store.transact(body, id=txn_id, hold=True)
        except IndilogError as error:
            if not is_transient(error):
                raise
            conflict = error if isinstance(error, ConflictError) else None
    if conflict is not None:
        raise conflict
    raise Stopped("The log is unavailable.")
