"""Rounds of a run: a workflow that never ends continues with new arguments and an empty history.

One record ends a round and begins the next one, so a crash cannot lose or repeat a round. This
record contains the unconsumed signals, so the run can be executed without the records before it.
Records before the previous round are trimmed from time to time. `execution` ends rounds, and
`runner` begins the next ones and trims.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
import structlog

from bokiflow.runs.records import (
    CodeVersion,
    RunContinued,
    Signalled,
    StepDecided,
    UnreadSignal,
    run_tag,
)
from bokiflow.runs.run_state import RunState
from indilog import IndilogError, Log
from indilog.sdk import SeqNum

SIGNAL: Final = "signal"
"""The kind of a decision that consumes a signal. It may also say that no signal came in time."""
NO_SIGNAL: Final = b"null"
SIGNAL_KEYS_MAX: Final = 256
"""Number of signal keys that a round keeps from the rounds before it."""
PAST_MAX: Final = 256
"""Smallest number of records of old rounds at which a history is trimmed."""
_decode_got = msgspec.json.Decoder(tuple[SeqNum, Any]).decode


class ContinuedAsNew(BaseException):
    """Ends the workflow's code; the run continues with these arguments.

    It is not an `Exception`, so that an `except Exception` in the workflow does not catch it.

    Attributes:
        given: the positional arguments.
        named: the arguments by name.
        arguments: all arguments as a JSON object; set when they were checked.
        version: a digest of the code that continues; set when the arguments were checked.
        code: the deployment of that code; None: the code is not deployed.
    """

    def __init__(self, given: tuple[object, ...], named: dict[str, object]) -> None:
        super().__init__()
        self.given = given
        self.named = named
        self.arguments = b"{}"
        self.version = ""
        self.code: CodeVersion | None = None


def consumed_signal(decided: StepDecided) -> tuple[SeqNum, Any] | None:
    """Return seqnum and value of the signal that an operation consumed; None: there is none."""
    if decided.kind != SIGNAL or decided.failure is not None or decided.result == NO_SIGNAL:
        return None
    return _decode_got(decided.result)


def unconsumed_signals(
    run: RunState, decided: Iterable[StepDecided]
) -> list[tuple[SeqNum, Signalled]]:
    """Return the signals to a run that no decided operation has consumed, in log order."""
    taken = {got[0] for one in decided if (got := consumed_signal(one)) is not None}
    return [(seqnum, signal) for seqnum, signal in run.signals if seqnum not in taken]


def next_round(
    run: RunState,
    decided: Iterable[StepDecided],
    continued: ContinuedAsNew,
    *,
    cancel_asked: bool,
) -> RunContinued:
    """Return the record that ends the round of a run and begins the next one.

    Args:
        run: the run, which its executor has just read.
        decided: all decisions of the round, also those that are not durable yet.
        continued: the arguments and the code of the next round.
        cancel_asked: whether a cancellation was requested that the workflow has not noticed.
    """
    started = run.started
    assert started is not None, "only a run that has begun continues"
    return RunContinued(
        epoch=run.epoch,
        round=run.round + 1,
        end=run.end,
        workflow=started.workflow,
        arguments=continued.arguments,
        executor=run.executor,
        version=continued.version,
        started_at=run.started_at,
        began=run.began,
        cancel_asked=cancel_asked,
        signals=tuple(
            UnreadSignal(seqnum, signal.name, signal.value, signal.key)
            for seqnum, signal in unconsumed_signals(run, decided)
        ),
        keys=tuple(run.signal_keys)[-SIGNAL_KEYS_MAX:],
        parent=started.parent,
        limit=started.limit,
        code=continued.code,
    )


async def trim_past(log: Log, id: str, run: RunState) -> None:  # noqa: A002
    """Trim the history of a run up to its previous round, if it has at least `PAST_MAX` older
    records.
    """
    if run.past < PAST_MAX:
        return
    try:
        await log.trim(run.floor, tag=run_tag(id))
    except IndilogError as error:  # a later round trims the history
        structlog.get_logger().warning("old rounds are not trimmed", run=id, reason=str(error))
    else:
        run.forget_past()
