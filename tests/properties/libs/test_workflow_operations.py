"""Two executors of one run in every interleaving: both return the outcomes that the log decided.

One executor has the run in epoch 1 and does not know that another has taken it. The stepper decides
which one makes the next call of the log. A plain replay of the log, which shares only the records
with the library, shows the decisions.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar
from unittest import mock

import msgspec
import pytest

import indilog
from bokiflow import Workflow
from bokiflow.locks import lock
from bokiflow.locks.lock_records import Acquire, Release, decode_command
from bokiflow.operations import calls, transactions
from bokiflow.operations.compensation import run_compensated
from bokiflow.operations.run_lock import RunLock
from bokiflow.operations.signals import Signals
from bokiflow.runs import run_state, waiting
from bokiflow.runs.execution import Execution
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import (
    RunFinished,
    RunRecord,
    RunStarted,
    RunTaken,
    Signalled,
    StepDecided,
    encode,
    run_record,
    run_tag,
)
from bokiflow.runs.run_log import read_run
from bokiflow.runs.run_state import RunState
from bokiflow.runs.states import State, next_state
from bokistore import Store, Transaction
from indilog.base.log import Log
from indilog.testing import MemoryLogs
from indilog.testing.stepper import Choose, SteppedLog, interleavings, run_stepped
from tests.support.elapsing_log import ElapsingLog, Time
from tests.support.flow_executions import FLOW_LOG, NeverSure, OneLog, begin, take

_ValueT = TypeVar("_ValueT")
RUN = "r"
Body = Callable[[Workflow, str], Awaitable[object]]


def now(coroutine: Coroutine[Any, Any, _ValueT]) -> _ValueT:
    """Run a coroutine that awaits only a log in memory to its end."""
    return run_stepped([coroutine], lambda ready: ready[0])[0]


async def pause(_: float) -> None:
    """No time passes."""


TIME = Time()


class Outcome:
    """The results of one interleaving.

    Attributes:
        logs: all records.
        reported: per executor its end, None if it was stopped.
        result: the decided end's, as a plain replay says.
    """

    def __init__(self, logs: MemoryLogs, reported: list[RunFinished | None]) -> None:
        self.logs = logs
        self.reported = reported
        self.finished, steps = replayed(logs.log(FLOW_LOG))
        run = now(read_run(logs.log(FLOW_LOG), RUN, RunState()))
        assert {number: step.result for number, step in run.steps.items()} == steps
        assert self.finished is not None, "one executor comes to the end"
        ends = {(f.result, f.failure) for f in (*reported, self.finished) if f is not None}
        assert len(ends) == 1, "every caller got the decided end"
        self.result = msgspec.json.decode(self.finished.result or b"null")


def replayed(log: Log) -> tuple[RunFinished | None, dict[str, bytes]]:
    """Return the end of the run and the outcomes decided before it, by a simple replay."""
    epoch = 0
    steps: dict[str, bytes] = {}
    for record in now(log.read_range(run_tag(RUN))):
        match run_record(record.data):
            case RunStarted():
                epoch = max(epoch, 1)
            case RunTaken(taken, _) if taken == epoch + 1:
                epoch = taken
            case StepDecided(decided, number) as step if decided == epoch:
                steps.setdefault(number, step.result)
            case RunFinished(ended) as finished if ended == epoch:
                return finished, steps
            case _:
                pass
    return None, steps


def run_twice(
    body: Body, choose: Choose, *, before: Callable[[MemoryLogs], None] = lambda _: None
) -> Outcome:
    TIME.now = 1000.0
    logs = MemoryLogs(clock=TIME)
    plain = logs.log(FLOW_LOG)
    now(begin(plain, RUN))
    before(logs)
    executions = [executing(logs, body, "first")]
    now(take(plain, RUN, "second"))
    executions.append(executing(logs, body, "second"))
    with (
        mock.patch.object(waiting, "pause", pause),
        mock.patch.object(lock, "seconds_now", TIME),
    ):
        return Outcome(logs, run_stepped(executions, choose))


def executing(logs: MemoryLogs, body: Body, name: str) -> Coroutine[Any, Any, RunFinished | None]:
    """Return an execution of the run as it is now."""
    log = ElapsingLog(logs.log(FLOW_LOG), TIME)
    execution = Execution(log, RUN, now(read_run(logs.log(FLOW_LOG), RUN, RunState())), NeverSure())
    wf = Workflow(execution, OneLog(log))

    async def text() -> bytes:
        return msgspec.json.encode(await body(wf, name))

    async def executed() -> RunFinished | None:
        try:
            return await execution.execute(run_compensated(wf.compensations, text()))
        except Stopped:
            return None

    return executed()


def sampled(run: Callable[[Choose], Outcome], count: int) -> Iterator[Outcome]:
    """Yield outcomes of interleavings by chance, where there are too many for all of them."""
    for seed in range(count):
        yield run(random.Random(seed).choice)


# --- steps


async def one_step(wf: Workflow, executor: str) -> object:
    async def who() -> str:
        return executor

    return [await wf.step(who), await wf.step(who, name="again")]


def check_steps() -> None:
    outcomes = list(interleavings(lambda choose: run_twice(one_step, choose)))
    assert len(outcomes) > 50
    assert {tuple(outcome.result) for outcome in outcomes} >= {("second", "second")}


def test_a_step_is_decided_once_in_every_interleaving() -> None:
    check_steps()


# --- signals


def signalled(*values: int) -> Callable[[MemoryLogs], None]:
    def send(logs: MemoryLogs) -> None:
        for value in values:
            record = Signalled("item", b"%d" % value, str(value))
            now(logs.log(FLOW_LOG).append(encode(record), tags=[run_tag(RUN)]))

    return send


async def two_signals(wf: Workflow, executor: str) -> object:
    return [await wf.signal("item"), await wf.signal("item")]


def check_signals() -> None:
    def run(choose: Choose) -> Outcome:
        return run_twice(two_signals, choose, before=signalled(1, 2, 3))

    outcomes = list(interleavings(run))
    assert len(outcomes) > 50
    assert {tuple(outcome.result) for outcome in outcomes} == {(1, 2)}


def test_a_signal_is_consumed_once_in_every_interleaving() -> None:
    check_signals()


def test_a_signal_comes_before_or_after_the_end_of_a_wait_and_never_twice() -> None:
    async def wait(wf: Workflow, executor: str) -> object:
        return [await wf.signal("item", timeout=0), await wf.signal("item", timeout=0)]

    def run(choose: Choose) -> Outcome:
        logs = MemoryLogs(clock=TIME)
        now(begin(logs.log(FLOW_LOG), RUN))
        execution = executing(logs, wait, "only")
        sender = SteppedLog(logs.log(FLOW_LOG))

        async def send() -> None:
            record = encode(Signalled("item", b"1", "key"))
            await sender.append(record, tags=[run_tag(RUN)])

        reported, _ = run_stepped([execution, send()], choose)
        return Outcome(logs, [reported])

    results = {tuple(outcome.result) for outcome in interleavings(run)}
    assert results == {(1, None), (None, 1), (None, None)}


# --- locks


async def locked(wf: Workflow, executor: str) -> object:
    async with wf.lock("hotel:7") as held:
        return held.token


def check_locks() -> None:
    def run(choose: Choose) -> Outcome:
        return run_twice(locked, choose)

    count = 0
    for count, outcome in enumerate(interleavings(run)):  # noqa: B007 - counted
        records = now(outcome.logs.log(FLOW_LOG).read_range("lock:hotel:7"))
        commands = [(r.seqnum, decode_command(r.data)) for r in records]
        releases = [at for at, c in commands if c == Release(outcome.result)]
        assert releases, "what the run acquired it released"
        owners = {command.owner for _, command in commands if isinstance(command, Acquire)}
        assert owners == {f"{FLOW_LOG}/{RUN}@0/1"}, "both executors are the one owner"
    assert count > 50


def test_both_executors_hold_the_lock_of_the_run_in_every_interleaving() -> None:
    check_locks()


# --- transactions


def check_transactions(count: int) -> None:
    """A body that writes in one executor and raises in the other: one of both counts."""

    def run(choose: Choose) -> Outcome:
        logs: list[MemoryLogs] = []

        async def paying(wf: Workflow, executor: str) -> object:
            async def pay(txn: Transaction) -> str:
                (await txn.get("ann")).increment("balance", 5)
                if executor == "second":
                    raise ValueError("too poor")
                return executor

            store = Store(SteppedLog(logs[0].log("accounts")))
            return await wf.transact(store, pay)

        return run_twice(paying, choose, before=logs.append)

    kept = set()
    for outcome in sampled(run, count):
        assert outcome.finished is not None
        has_paid = outcome.finished.failure is None
        kept.add(has_paid)
        ann = now(Store(outcome.logs.log("accounts")).get("ann"))
        assert ann.get("balance", 0) == (5 if has_paid else 0)
    assert kept == {True, False}


@pytest.mark.heavy
def test_a_transaction_counts_as_the_log_decided() -> None:
    check_transactions(400)


# --- calls


app = indilog.App("shop")


@app.function
async def serve(ctx: indilog.Context, executor: str) -> str:
    """Only its signature counts here."""
    return executor


class Platform:
    """Runs each call of one key once: the first of its records counts."""

    def __init__(self, log: Log) -> None:
        self._log = log

    async def call_held(
        self, function: object, arguments: dict[str, str], *, key: str, holder: str
    ) -> str:
        tag = f"call:{key or arguments['executor']}"
        if await self._log.read_next(tag) is None:
            await self._log.append(arguments["executor"].encode(), tags=[tag])
        record = await self._log.read_next(tag)
        assert record is not None
        return record.data.decode()


async def calling(wf: Workflow, executor: str) -> object:
    return await wf.call(serve, executor)


def check_calls() -> None:
    def run(choose: Choose) -> Outcome:
        return run_twice(calling, choose)

    platform = property(lambda wf: Platform(wf.execution.log))
    with mock.patch.object(Workflow, "ctx", platform):
        for count, outcome in enumerate(interleavings(run)):  # noqa: B007 - counted
            tag = f"call:{FLOW_LOG}/{RUN}@0/1"
            first = now(outcome.logs.log(FLOW_LOG).read_next(tag))
            assert first is not None, "it is called under the key of the operation"
            assert outcome.result == first.data.decode()
    assert count > 50


def test_a_call_has_the_platforms_one_outcome_in_every_interleaving() -> None:
    check_calls()


# --- planted bugs: each must be caught by the checks above


def epoch_is_not_compared(state: State | None, record: RunRecord, epoch: int) -> State | None:
    if isinstance(record, StepDecided | RunFinished):
        epoch = record.epoch
    return next_state(state, record, epoch)


async def skip_catching_up(execution: Execution, until: int = -1) -> None:
    await read_run(execution.log, execution.id, execution.run, until)


def taken_again(signals: Signals, name: str) -> bytes | None:
    for seqnum, signal in signals._execution.run.signals:
        if signal.name == name:
            return b"[%d,%b]" % (seqnum, signal.value)
    return None


def lock_without_checking(self: RunLock, execution: Execution, *others: Any) -> None:  # noqa: ANN401
    made(self, execution, *others)
    self._lock._owner = None


made = RunLock.__init__


def no_key(key: str, bytes_max: int) -> str:
    return ""


patiently = transactions._transact_with_retry


async def failure_is_only_returned(store: Store, body: Any, txn_id: str) -> Any:  # noqa: ANN401
    if body.__name__ == "failed":
        return await body(None)
    return await patiently(store, body, txn_id)


def check_some_transactions() -> None:
    check_transactions(200)


@pytest.mark.parametrize(
    ("where", "what", "planted", "check"),
    [
        (run_state, "next_state", epoch_is_not_compared, check_steps),
        (Execution, "catch_up", skip_catching_up, check_steps),
        (Signals, "_take", taken_again, check_signals),
        (RunLock, "__init__", lock_without_checking, check_locks),
        (calls, "short_key", no_key, check_calls),
        (transactions, "_transact_with_retry", failure_is_only_returned, check_some_transactions),
    ],
)
def test_a_planted_bug_is_caught(
    where: object, what: str, planted: Callable[..., Any], check: Callable[[], None]
) -> None:
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(where, what, planted))
        stack.enter_context(pytest.raises(AssertionError))
        check()
