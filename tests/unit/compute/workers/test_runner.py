"""A worker's side of a call, over a link without a process: what a caller gets of each ending."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import structlog

from indilog.link.link import Link
from indilog.link.link_messages import (
    LINK_VERSION,
    Answer,
    CallFunction,
    Cancel,
    Done,
    Failed,
    Greeting,
    LogQuestion,
    Question,
    Returned,
    Welcome,
)
from indilog.link.worker_messages import Invoke, Load, Loaded, Ping, ThreadsLeft, Unload
from indilog.testing import MemoryLogs
from indilog_compute.log_service import LinkLogService
from indilog_compute.workers import runner
from indilog_compute.workers.claims import NodeClaims, WorkerClaims, claims_memory
from indilog_compute.workers.runner import WorkerRunner
from tests.support.link_pair import LIMITS, link_pair

pytestmark = pytest.mark.asyncio
_numbers = itertools.count(50_000)
SOURCE = """
import asyncio, threading
from indilog.apps.app import App, Context
from indilog.base.errors import NotFoundError, NotReadyError, UnknownFunctionError

app = App("demo")

@app.function
async def append(ctx: Context, text: str) -> int:
    return await ctx.log("l").append(text.encode())

@app.function
async def raises(ctx: Context) -> None:
    await ctx.log("l").append(b"before")
    raise KeyError("planted")

@app.function
async def leaves() -> None:
    raise SystemExit(3)

@app.function
async def not_ready() -> None:
    raise NotReadyError("Try again.")

@app.function
async def misses() -> None:
    raise UnknownFunctionError("Another one.")

@app.function
async def waits() -> None:
    await asyncio.Event().wait()

@app.function
def thread() -> bool:
    return threading.current_thread() is threading.main_thread()

GATE, BLOCKED = threading.Event(), threading.Event()

@app.function
def blocks() -> bool:
    BLOCKED.set()
    return GATE.wait(60)

@app.function
def waits_in_thread(ctx: Context) -> None:
    BLOCKED.set()
    while True:
        try:
            ctx.wait(ctx.log("l").read_next("nothing", wait=60))
        except Exception:  # it may not swallow that its call is over
            pass

@app.function
def waits_when_let(ctx: Context) -> None:
    BLOCKED.set()
    GATE.wait(60)
    waits_in_thread(ctx)

@app.function
async def interrupts() -> None:
    raise KeyboardInterrupt

@app.function
def exits_in_thread() -> None:
    raise SystemExit(3)

@app.function
async def cancels() -> None:
    raise asyncio.CancelledError

@app.function
async def large() -> str:
    return "x" * 5_000_000

@app.function
async def calls(ctx: Context, n: int) -> int:
    return await ctx.call("other.f", n=n)

async def see(ctx: Context, n: int, fail: str = "") -> int:
    if fail:
        raise {"gone": NotFoundError, "bug": KeyError}[fail]("No such thing.")
    return await ctx.log("l").append(b"%d" % n)

app.add_operation("things.see", see)
"""


class Node:
    """The compute node's end: serves the log, answers calls by doubling `n`."""

    def __init__(self, directory: Path, **options: Any) -> None:  # noqa: ANN401 - of the runner
        self.logs = MemoryLogs()
        memory = claims_memory()
        self.claims = NodeClaims(memory)
        self.runner = WorkerRunner(directory, threads_max=1, claims=WorkerClaims(memory), **options)
        os.close(memory)
        self.threads_left: list[int] = []
        self._released = asyncio.Event()
        self.asked_log = asyncio.Event()
        self.asked: list[CallFunction] = []
        self._service = LinkLogService(self.logs, questions_max=100)
        self.link, self.worker_link = link_pair(self.runner.serve, self._serve)
        self.link.tell(Welcome(LINK_VERSION, LIMITS))
        self.deployment = next(_numbers)

    async def load(self) -> Answer:
        return await self.link.ask(Load(self.deployment, None, {"demo.py": SOURCE}))

    def there(self, name: str) -> threading.Event:
        """Return an event of the deployed code."""
        body = self.runner._deployments[self.deployment].functions["blocks"].body
        event = body.__globals__[name]
        assert isinstance(event, threading.Event)
        return event

    def post(self, function: str) -> int:
        """Start a call; `answer` is its answer."""
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        invoke = Invoke(self.deployment, function, b"{}", "i-1", 0, 0)
        return self.link.post(invoke, self.answer.set_result)

    async def until_threads_left(self, reported: list[int]) -> None:
        while self.threads_left != reported:
            self._released.clear()
            await self._released.wait()

    async def invoke(self, function: str, arguments: bytes = b"{}", position: int = 0) -> Answer:
        slot = self.claims.allocate()
        return await self.link.ask(
            Invoke(self.deployment, function, arguments, "i-1", position, 2, slot)
        )

    def _serve(self, link: Link, call: int, message: Question | Greeting) -> None:
        if isinstance(message, CallFunction):
            self.asked.append(message)
            link.answer(call, Returned(message.position + 3, b"84"))
        elif isinstance(message, ThreadsLeft):
            self.threads_left.append(message.count)
            self._released.set()
        elif isinstance(message, Cancel):
            self._service.cancel(call)
        else:
            assert isinstance(message, LogQuestion)
            self.asked_log.set()
            self._service.serve(link, call, message)


@pytest_asyncio.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path)
    assert isinstance(await made.load(), Loaded)
    yield made
    made.link.tell(Unload(made.deployment))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.to_thread(made.runner.close)


def failure(answer: Answer) -> tuple[str, str]:
    assert isinstance(answer, Failed)
    return answer.kind, answer.message


async def test_a_result_is_returned_with_the_session(node: Node) -> None:
    assert await node.invoke("append", b'{"text":"x"}') == Returned(1, b"0")


async def test_a_failure_is_returned_with_the_session_too(node: Node) -> None:
    answer = await node.invoke("raises")
    assert failure(answer) == ("FunctionFailedError", "demo.raises failed: KeyError: 'planted'.")
    assert isinstance(answer, Failed)
    assert answer.attributes == {"kind": "KeyError", "temporary": False}
    assert answer.position == node.logs.position == 1


async def test_arguments_that_do_not_fit_are_not_run(node: Node) -> None:
    kind, sentence = failure(await node.invoke("append", b"{}"))
    assert kind == "InvalidArgumentsError"
    assert sentence == "demo.append was not run: field 'text' is missing."
    assert node.logs.position == 0


async def test_an_exit_in_a_function_ends_the_call_and_not_the_worker(node: Node) -> None:
    assert failure(await node.invoke("leaves"))[0] == "FunctionFailedError"
    assert isinstance(await node.invoke("append", b'{"text":"x"}'), Returned)


@pytest.mark.parametrize("function", ["interrupts", "exits_in_thread", "cancels"])
async def test_any_exception_of_a_function_ends_its_call_only(node: Node, function: str) -> None:
    kind, sentence = failure(await node.invoke(function))
    assert kind == "FunctionFailedError"
    assert sentence.startswith(f"demo.{function} failed: ")
    assert isinstance(await node.invoke("append", b'{"text":"x"}'), Returned)


async def test_an_error_of_the_platform_inside_a_function_is_the_functions_failure(
    node: Node,
) -> None:
    """The function's caller made no mistake. The error names the failed function, and whether it
    may be transient.
    """
    answer = await node.invoke("not_ready")
    assert failure(answer) == (
        "FunctionFailedError",
        "demo.not_ready failed: NotReadyError: Try again.",
    )
    assert isinstance(answer, Failed)
    assert answer.attributes == {"kind": "NotReadyError", "temporary": True}
    answer = await node.invoke("misses")
    assert isinstance(answer, Failed)
    assert answer.attributes == {"kind": "UnknownFunctionError", "temporary": False}


async def test_an_operation_runs_like_a_function_and_its_errors_stay_as_they_are(
    node: Node,
) -> None:
    assert await node.invoke("things.see", b'{"n":5}') == Returned(1, b"0")
    answer = await node.invoke("things.see", b'{"n":5,"fail":"gone"}')
    assert failure(answer) == ("NotFoundError", "No such thing.")
    answer = await node.invoke("things.see", b'{"n":5,"fail":"bug"}')
    assert failure(answer)[0] == "FunctionFailedError"
    answer = await node.invoke("things.see", b'{"n":"x"}')
    assert failure(answer)[0] == "InvalidArgumentsError"


async def test_the_log_says_where_in_the_deployed_code_a_function_failed(node: Node) -> None:
    with structlog.testing.capture_logs() as logged:
        await node.invoke("raises")
    [line] = [one for one in logged if one["event"] == "function failed"]
    number = SOURCE.splitlines().index('    raise KeyError("planted")') + 1
    assert (line["function"], line["place"]) == ("demo.raises", f"demo.py, line {number}")


async def test_an_error_about_another_call_becomes_the_functions_failure(node: Node) -> None:
    kind, sentence = failure(await node.invoke("misses"))
    assert kind == "FunctionFailedError"
    assert "UnknownFunctionError: Another one." in sentence


async def test_a_cancelled_call_answers_that_it_ended(node: Node) -> None:
    answers: list[Answer] = []
    came = asyncio.Event()

    def answered(answer: Answer) -> None:
        answers.append(answer)
        came.set()

    invoke = Invoke(node.deployment, "waits", b"{}", "i-1", 0, 0)
    call = node.link.post(invoke, answered)
    assert isinstance(await node.invoke("append", b'{"text":"x"}'), Returned)  # it runs by now
    node.link.cancel(call)
    await came.wait()
    assert failure(answers[0])[0] == "CallOutcomeUnknownError"


async def test_a_call_cancelled_before_it_began_answers_too(node: Node) -> None:
    came = asyncio.Event()
    invoke = Invoke(node.deployment, "waits", b"{}", "i-1", 0, 0)
    call = node.link.post(invoke, lambda _: came.set())
    node.link.cancel(call)
    await came.wait()


async def test_sync_functions_run_in_threads(node: Node) -> None:
    assert await node.invoke("thread") == Returned(0, b"false")


async def test_sync_functions_beyond_the_threads_are_refused(node: Node) -> None:
    first = asyncio.ensure_future(node.invoke("blocks"))
    await asyncio.to_thread(node.there("BLOCKED").wait)
    kind, sentence = failure(await node.invoke("thread"))
    assert (kind, "1 sync functions run" in sentence) == ("OverloadedError", True)
    node.there("GATE").set()
    assert await first == Returned(0, b"true")
    assert await node.invoke("thread") == Returned(0, b"false")


async def test_a_thread_that_outlives_its_call_is_reported_until_it_ends(node: Node) -> None:
    call = node.post("blocks")
    await asyncio.to_thread(node.there("BLOCKED").wait)
    node.link.cancel(call)
    assert failure(await node.answer)[0] == "CallOutcomeUnknownError"
    await node.until_threads_left([1])
    node.there("GATE").set()
    await node.until_threads_left([1, 0])


async def test_a_thread_that_waits_for_the_platform_ends_when_its_call_is_over(node: Node) -> None:
    call = node.post("waits_in_thread")
    await node.asked_log.wait()
    node.link.cancel(call)
    assert failure(await node.answer)[0] == "CallOutcomeUnknownError"
    await node.until_threads_left([1, 0])


async def test_a_thread_whose_call_is_over_ends_when_it_waits_for_the_platform(node: Node) -> None:
    call = node.post("waits_when_let")
    await asyncio.to_thread(node.there("BLOCKED").wait)
    node.link.cancel(call)
    assert failure(await node.answer)[0] == "CallOutcomeUnknownError"
    await node.until_threads_left([1])
    node.there("GATE").set()
    await node.until_threads_left([1, 0])


async def test_a_revoked_call_is_not_run(node: Node) -> None:
    slot = node.claims.allocate()
    node.claims.revoke(slot)
    invoke = Invoke(node.deployment, "append", b'{"text":"x"}', "i-1", 0, 0, slot)
    assert failure(await node.link.ask(invoke))[0] == "RevokedError"
    assert node.logs.position == 0


async def test_a_worker_answers_pings(node: Node) -> None:
    assert await node.link.ask(Ping()) == Done(0)


async def test_memory_is_checked_after_the_last_error_of_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During a further attempt of a step, memory is in use that the end of the attempt frees."""
    loop, checks = asyncio.get_running_loop(), list[int]()

    def is_used_up(imported_bytes: int) -> bool:
        checks.append(imported_bytes)
        return False

    node = Node(tmp_path, is_memory_used_up=is_used_up)
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)
    for second in range(31):
        now += 1.0
        node.runner.note_memory_error()
        check = node.runner._memory_check
        assert check is not None
        assert check.when() - now == pytest.approx(min(2.0, 30.0 - second))
        assert not checks
    monkeypatch.undo()
    await node.runner.stop()


async def test_the_memory_check_gets_what_the_imports_of_loaded_code_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_MEMORY_CHECK_S", 0.0)
    checked: asyncio.Queue[int] = asyncio.Queue()

    def is_used_up(imported_bytes: int) -> bool:
        checked.put_nowait(imported_bytes)
        return False

    in_use = iter((100, 130, 200, 250))
    node = Node(tmp_path, memory_in_use=in_use.__next__, is_memory_used_up=is_used_up)
    assert isinstance(await node.load(), Loaded)
    first, node.deployment = node.deployment, next(_numbers)
    assert isinstance(await node.load(), Loaded)
    for imported_bytes in (80, 50):
        node.runner.note_memory_error()
        node.runner.note_memory_error()  # one check is enough
        assert await checked.get() == imported_bytes
        node.link.tell(Unload(first))
        assert await node.link.ask(Ping()) == Done(0)
        assert checked.empty()
    await node.runner.stop()


async def test_a_result_over_the_limit_is_the_functions_failure(node: Node) -> None:
    kind, sentence = failure(await node.invoke("large"))
    assert kind == "FunctionFailedError"
    assert "the limit is 4,194,304" in sentence


async def test_a_child_call_inherits_the_session_and_returns_it(node: Node) -> None:
    assert await node.invoke("calls", b'{"n":42}', position=7) == Returned(10, b"84")
    assert node.asked == [CallFunction("other.f", b'{"n":42}', 7, 3)]


async def test_a_call_of_a_deployment_that_is_not_loaded_fails_as_retryable(node: Node) -> None:
    answer = await node.link.ask(Invoke(1, "append", b"{}", "i-1", 0, 0))
    assert failure(answer)[0] == "NotReadyError"


async def test_sources_that_do_not_import_are_reported_and_change_nothing_else(node: Node) -> None:
    answer = await node.link.ask(Load(next(_numbers), None, {"a.py": "import nope_"}))
    assert failure(answer)[0] == "DeployError"
    answer = await node.link.ask(Load(next(_numbers), "no name", {"a.py": SOURCE}))
    assert failure(answer)[0] == "DeployError"
    assert isinstance(await node.invoke("append", b'{"text":"x"}'), Returned)
