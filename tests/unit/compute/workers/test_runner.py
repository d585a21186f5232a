"""A worker's side of a call, over a link without a process: what a caller gets of each ending."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from compute.log_service import LogService
from compute.workers.runner import Runner
from indilog.calls import (
    LINK_VERSION,
    Answer,
    CallFunction,
    Failed,
    Greeting,
    Invoke,
    Load,
    Loaded,
    LogQuestion,
    Question,
    Returned,
    Unload,
    Welcome,
)
from indilog.link import Link
from indilog.testing import MemoryLogs
from tests.link_pair import LIMITS, link_pair

pytestmark = pytest.mark.asyncio
_numbers = itertools.count(50_000)
SOURCE = """
import asyncio, threading
from indilog.app import App, Context
from indilog.errors import NotReadyError, UnknownFunctionError

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

@app.function
async def large() -> str:
    return "x" * 5_000_000

@app.function
async def calls(ctx: Context, n: int) -> int:
    return await ctx.call("other.f", n=n)
"""


class Node:
    """The compute node's end: serves the log, answers calls by doubling `n`."""

    def __init__(self, directory: Path) -> None:
        self.logs = MemoryLogs()
        self.runner = Runner(directory, threads_max=1)
        self.asked: list[CallFunction] = []
        self._service = LogService(self.logs, questions_max=100)
        self.link, self.worker_link = link_pair(self.runner.serve, self._serve)
        self.link.tell(Welcome(LINK_VERSION, LIMITS))
        self.deployment = next(_numbers)

    async def load(self) -> Answer:
        return await self.link.ask(Load(self.deployment, None, {"demo.py": SOURCE}))

    async def invoke(self, function: str, arguments: bytes = b"{}", position: int = 0) -> Answer:
        return await self.link.ask(Invoke(self.deployment, function, arguments, "i-1", position, 2))

    def _serve(self, link: Link, call: int, message: Question | Greeting) -> None:
        if isinstance(message, CallFunction):
            self.asked.append(message)
            link.answer(call, Returned(message.position + 3, b"84"))
        else:
            assert isinstance(message, LogQuestion)
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


async def test_a_result_comes_back_with_the_session(node: Node) -> None:
    assert await node.invoke("append", b'{"text":"x"}') == Returned(1, b"0")


async def test_a_failure_brings_the_session_back_too(node: Node) -> None:
    answer = await node.invoke("raises")
    assert failure(answer) == ("FunctionFailedError", "demo.raises failed: KeyError: 'planted'.")
    assert isinstance(answer, Failed)
    assert answer.attributes == {"kind": "KeyError"}
    assert answer.position == node.logs.position == 1


async def test_arguments_that_do_not_fit_are_not_run(node: Node) -> None:
    kind, sentence = failure(await node.invoke("append", b"{}"))
    assert kind == "InvalidArgumentsError"
    assert sentence == "demo.append was not run: field 'text' is missing."
    assert node.logs.position == 0


async def test_an_exit_in_a_function_ends_the_call_and_not_the_worker(node: Node) -> None:
    assert failure(await node.invoke("leaves"))[0] == "FunctionFailedError"
    assert isinstance(await node.invoke("append", b'{"text":"x"}'), Returned)


async def test_the_platforms_errors_pass_through_a_function(node: Node) -> None:
    assert failure(await node.invoke("not_ready")) == ("NotReadyError", "Try again.")


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
    node.runner.threads_used = 1
    assert failure(await node.invoke("thread"))[0] == "OverloadedError"
    node.runner.threads_used = 0
    assert threading.active_count() > 0


async def test_a_result_over_the_limit_is_the_functions_failure(node: Node) -> None:
    kind, sentence = failure(await node.invoke("large"))
    assert kind == "FunctionFailedError"
    assert "the limit is 4,194,304" in sentence


async def test_a_child_call_inherits_the_session_and_gives_it_back(node: Node) -> None:
    assert await node.invoke("calls", b'{"n":42}', position=7) == Returned(10, b"84")
    assert node.asked == [CallFunction("other.f", b'{"n":42}', 7, 3)]


async def test_a_deployment_that_is_not_here_is_worth_trying_again(node: Node) -> None:
    answer = await node.link.ask(Invoke(1, "append", b"{}", "i-1", 0, 0))
    assert failure(answer)[0] == "NotReadyError"


async def test_what_does_not_import_is_told_and_leaves_the_rest(node: Node) -> None:
    answer = await node.link.ask(Load(next(_numbers), None, {"a.py": "import nope_"}))
    assert failure(answer)[0] == "DeployError"
    answer = await node.link.ask(Load(next(_numbers), "no name", {"a.py": SOURCE}))
    assert failure(answer)[0] == "DeployError"
    assert isinstance(await node.invoke("append", b'{"text":"x"}'), Returned)
