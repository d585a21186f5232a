"""The attempts of a step: policies of retries, timeouts, and errors that are not retried."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from bokiflow import Flow, FlowSettingsError, Retry, RunFailedError, Workflow
from bokiflow.runs import waiting
from bokiflow.workflow import Errors
from indilog.testing import MemoryLogs

pytestmark = pytest.mark.asyncio


@pytest.fixture
def flow() -> Flow:
    flow = Flow("shop")
    flow.attach(MemoryLogs())
    return flow


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts; time passes only in them."""
    passed: list[float] = []

    async def pause(seconds: float) -> None:
        if len(passed) < 10_000 and seconds < 1.0:
            passed.append(seconds)
        await asyncio.sleep(0 if seconds < 1.0 else seconds)

    monkeypatch.setattr(waiting, "pause", pause)
    monkeypatch.setattr(waiting, "monotonic_now", lambda: sum(passed))
    return passed


async def run(flow: Flow, body: Callable[..., object], **policy: Any) -> object:  # noqa: ANN401 - options of a step
    """Run a workflow of one step with this policy."""

    @flow.workflow
    async def one(wf: Workflow) -> object:
        return await wf.step(body, **policy)

    return await (await one.start()).result(timeout=20)


class Failing:
    """A body that raises so often before it returns."""

    def __init__(self, times: int, error: type[Exception] = ValueError) -> None:
        self.times, self.error, self.calls = times, error, 0

    async def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error("not yet")
        return self.calls


class Memory:
    """An object that an attempt needs."""


class NeedsMemory:
    """A body whose first attempt fails. The second one returns whether the first one's memory is
    free.
    """

    def __init__(self) -> None:
        self.first: weakref.ref[Memory] | None = None

    def body(self) -> bool:
        if self.first is not None:
            return self.first() is None
        memory = Memory()
        self.first = weakref.ref(memory)
        raise ValueError("not yet")

    async def async_body(self) -> bool:
        await asyncio.sleep(0)
        return self.body()


async def body_name() -> None:
    """Do nothing."""


@pytest.mark.parametrize("name", ["body", "async_body"])
async def test_a_failed_attempt_keeps_no_memory_while_the_next_one_runs(
    flow: Flow, name: str
) -> None:
    body = getattr(NeedsMemory(), name)
    gc.collect()
    gc.disable()  # a cycle of references would be freed at some time only
    try:
        assert await run(flow, body, backoff=0.001) is True
    finally:
        gc.enable()


async def test_pauses_grow_by_the_factor_up_to_the_longest(flow: Flow, passed: list[float]) -> None:
    retry = Retry(6, first=0.01, factor=3, longest=0.1)
    assert await run(flow, Failing(5), retry=retry) == 6
    between = [seconds for seconds in passed if seconds]
    assert between == pytest.approx([0.01, 0.03, 0.09, 0.1, 0.1])


@pytest.mark.parametrize("policy", [{}, {"retry": Retry()}])
async def test_a_step_is_attempted_four_times_by_default(
    flow: Flow, passed: list[float], policy: dict[str, Any]
) -> None:
    failing = Failing(100)
    with pytest.raises(RunFailedError):
        await run(flow, failing, **policy)
    assert (failing.calls, [s for s in passed if s]) == (4, [0.1, 0.2, 0.4])


async def test_no_attempt_begins_after_the_time_of_the_policy(
    flow: Flow, passed: list[float]
) -> None:
    failing = Failing(1000)
    with pytest.raises(RunFailedError, match="not yet"):
        await run(flow, failing, retry=Retry(1000, first=0.1, factor=1, until=0.35))
    assert failing.calls == 4


@pytest.mark.parametrize("give_up_on", [KeyError, (TypeError, LookupError)])
async def test_errors_of_these_types_are_not_retried(flow: Flow, give_up_on: Errors) -> None:
    failing = Failing(3, KeyError)
    with pytest.raises(RunFailedError, match="KeyError"):
        await run(flow, failing, retries=5, backoff=0, give_up_on=give_up_on)
    assert failing.calls == 1


async def test_an_attempt_that_takes_too_long_is_cancelled_and_repeated(flow: Flow) -> None:
    cancelled: list[int] = []

    async def hangs() -> str:
        if len(cancelled) == 2:
            return "in time"
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise
        return "late"

    assert await run(flow, hangs, timeout=timedelta(seconds=0.01), backoff=0) == "in time"
    assert len(cancelled) == 2


async def test_the_last_timeout_is_the_outcome_and_names_the_limit(flow: Flow) -> None:
    async def hangs() -> None:
        await asyncio.sleep(60)

    with pytest.raises(RunFailedError, match=r"TimeoutError: Step 'hangs' took longer .* 0.01 s"):
        await run(flow, hangs, timeout=0.01, retries=0)


async def test_a_timeout_of_the_body_itself_is_not_taken_for_that_of_the_step(flow: Flow) -> None:
    async def impatient() -> None:
        raise TimeoutError("its own")

    with pytest.raises(RunFailedError, match="its own"):
        await run(flow, impatient, timeout=30, retries=0)


async def test_a_sync_body_that_takes_too_long_is_not_waited_for(flow: Flow) -> None:
    ending = threading.Event()
    try:
        with pytest.raises(RunFailedError, match="took longer"):
            await run(flow, lambda: ending.wait(30), timeout=0.01, retries=0, name="waits")
    finally:
        ending.set()


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"timeout": 0}, "timeout must be greater than 0"),
        ({"timeout": -1}, "timeout must be greater than 0"),
        ({"give_up_on": ("ValueError",)}, "give_up_on takes types of errors"),
        ({"retry": Retry(), "retries": 1}, "not both"),
        ({"retries": 1001}, "retries must be 0 to 1,000"),
    ],
)
async def test_a_wrong_policy_is_refused_before_anything_runs(
    flow: Flow, policy: dict[str, Any], words: str
) -> None:
    with pytest.raises(RunFailedError, match=words):
        await run(flow, body_name, **policy)


@pytest.mark.parametrize(
    ("field", "value"),
    [("attempts", 0), ("first", -1), ("factor", 0.5), ("longest", -1), ("until", -1)],
)
async def test_a_wrong_value_of_a_policy_names_its_range(field: str, value: float) -> None:
    with pytest.raises(FlowSettingsError, match=f"Retry: {field} must be"):
        Retry(**{field: value})  # type: ignore[arg-type]
