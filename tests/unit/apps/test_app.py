"""Applications and contexts: decorated functions remain callable, and calls pass sessions on and
back.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from indilog.apps.app import OPERATIONS_MAX, App, Context, function_of
from indilog.base.errors import NotReadyError
from indilog.base.log import Session
from indilog.testing import MemoryLogs
from tests.support.flow_executions import NothingHeld

app = App("demo")


@app.function
async def double(ctx: Context, n: int) -> int:
    """Twice n."""
    return 2 * n


@app.function(name="tripled", timeout_s=2.5)
def triple(n: int) -> int:
    return 3 * n


class Echo(NothingHeld):
    """Answers every call with its arguments, and raises the session by one."""

    def __init__(self) -> None:
        self.called: list[tuple[str, bytes, int]] = []
        self.running = 0
        self.running_most = 0

    async def call(
        self, function: str, arguments: bytes, session: Session, *, key: str = "", holder: str = ""
    ) -> bytes:
        self.called.append((function, arguments, session.position))
        self.running += 1
        self.running_most = max(self.running, self.running_most)
        await asyncio.sleep(0)
        self.running -= 1
        session.saw(session.position + 1)
        if b"fail" in arguments:
            raise NotReadyError("Planted.")
        return b'{"value":7}' if "." in function and function != "demo.double" else b"14"

    async def send(
        self, function: str, arguments: bytes, session: Session, *, delay_s: float, key: str = ""
    ) -> str:
        self.called.append((function, arguments, session.position))
        return f"after {delay_s}"


def context(caller: Echo | None = None) -> Context:
    return Context(MemoryLogs(), caller or Echo(), invocation_id="i-1", function="demo.me")


async def _run_direct() -> int:
    return await double(context(), 4)


def test_a_decorated_function_is_called_like_any_other() -> None:
    assert asyncio.run(_run_direct()) == 8
    assert triple(2) == 6


def test_the_application_knows_its_functions_by_name() -> None:
    assert sorted(app.functions) == ["double", "tripled"]
    known = function_of(triple)
    assert known is not None
    assert (known.qualified_name, known.timeout_s, known.is_async) == ("demo.tripled", 2.5, False)
    assert function_of(print) is None
    assert app.functions["double"].doc == "Twice n."


@pytest.mark.parametrize("name", ["", "1st", "a b", "a.b", "x" * 65, "ä", "$apps"])
def test_an_invalid_function_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name is"):
        App(name)


def test_two_functions_of_one_name_are_refused() -> None:
    other = App("other")

    @other.function
    def same() -> None: ...

    with pytest.raises(ValueError, match="two functions named same"):
        other.function(name="same")(lambda: None)


def test_an_invalid_timeout_is_refused() -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        App("other").function(timeout_s=0, name="f")(lambda: None)


@pytest.mark.asyncio
async def test_a_call_sends_the_session_and_returns_it() -> None:
    echo = Echo()
    ctx = context(echo)
    ctx.session.saw(5)
    assert await ctx.call(double, n=7) == 14
    assert await ctx.call("demo.other", n=7) == {"value": 7}
    assert echo.called == [("demo.double", b'{"n":7}', 5), ("demo.other", b'{"n":7}', 6)]
    assert ctx.session.position == 7


@pytest.mark.asyncio
async def test_send_returns_the_invocation_id() -> None:
    echo = Echo()
    assert await context(echo).send(double, n=1, delay=2.0) == "after 2.0"
    assert echo.called == [("demo.double", b'{"n":1}', 0)]


@pytest.mark.asyncio
async def test_map_keeps_the_order_and_the_bound() -> None:
    echo = Echo()
    results = await context(echo).map("demo.double", [{"n": n} for n in range(9)], calls_max=3)
    assert results == [14] * 9
    assert echo.running_most == 3


@pytest.mark.asyncio
@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), 1e12])
async def test_an_invalid_delay_is_refused(delay: float) -> None:
    with pytest.raises(ValueError, match="delay is a number of seconds"):
        await context().send(double, n=1, delay=delay)


@pytest.mark.asyncio
async def test_map_refuses_items_that_are_no_keyword_arguments() -> None:
    items: list[Any] = [{"n": 1}, 2]
    with pytest.raises(TypeError, match=r"map takes the keyword arguments .* not int: 2\."):
        await context().map("demo.double", items)


@pytest.mark.asyncio
async def test_map_raises_the_first_failure() -> None:
    with pytest.raises(NotReadyError):
        await context().map("demo.double", [{"n": 1}, {"n": "fail"}])


@pytest.mark.asyncio
async def test_something_that_is_no_function_of_an_app_cannot_be_called() -> None:
    with pytest.raises(TypeError, match=r"decorate it with @app\.function"):
        await context().call(len)


@pytest.mark.asyncio
async def test_all_logs_of_a_context_share_its_session() -> None:
    ctx = context()
    await ctx.log("a").append(b"x")
    position = ctx.session.position
    await ctx.log("b").append(b"y")
    assert ctx.session.position >= position > -1


@pytest.mark.asyncio
async def test_a_sync_function_waits_for_the_log_from_its_thread() -> None:
    ctx = context()

    def body() -> int:
        return ctx.wait(ctx.log("a").append(b"x"))

    assert await asyncio.get_running_loop().run_in_executor(None, body) == 0


def test_a_scheduled_function_is_a_function_of_the_app_whichever_decorator_is_first() -> None:
    app = App("demo")

    @app.schedule("0 3 * * *", timezone="Europe/Berlin", catch_up="all")
    @app.schedule("*/5 * * * *")
    async def sweep(ctx: Context) -> None: ...

    @app.function(timeout_s=5)
    @app.schedule("0 0 * * *")
    async def tidy() -> None: ...

    @app.schedule("0 1 * * *")
    @app.function(name="other")
    async def third() -> None: ...

    assert set(app.functions) == {"sweep", "tidy", "other"}
    assert app.functions["tidy"].timeout_s == 5
    assert [(s.function, s.expression, s.timezone, s.catch_up) for s in app.schedules] == [
        ("sweep", "*/5 * * * *", "UTC", "last"),
        ("sweep", "0 3 * * *", "Europe/Berlin", "all"),
        ("tidy", "0 0 * * *", "UTC", "last"),
        ("other", "0 1 * * *", "UTC", "last"),
    ]


def test_a_bad_schedule_is_refused_at_its_decorator() -> None:
    app = App("demo")
    with pytest.raises(ValueError, match="has five fields"):
        app.schedule("soon")(double)


async def list_all(ctx: Context, limit: int = 10) -> list[str]:
    """List all."""
    return []


def test_an_operation_is_an_async_function_with_a_name_of_its_own() -> None:
    made = App("shop")
    made.add_operation("queue.list", list_all, timeout_s=2.0)
    operation = made.operations["queue.list"]
    assert (operation.name, operation.timeout_s, operation.public) == ("queue.list", 2.0, False)
    assert "queue.list" not in made.functions
    with pytest.raises(ValueError, match=r"two operations named queue\.list"):
        made.add_operation("queue.list", list_all)
    with pytest.raises(TypeError, match=r"make queue\.peek one"):
        made.add_operation("queue.peek", lambda _: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"timeout_s of queue\.peek must be greater than 0, not 0"):
        made.add_operation("queue.peek", list_all, timeout_s=0)


@pytest.mark.parametrize(
    "name", ["list", "", ".", "a.", ".b", "a..b", "a/b.c", "A.b", "a.b\n", "a." + "b" * 63, "é.a"]
)
def test_an_operations_name_is_words_joined_by_dots(name: str) -> None:
    with pytest.raises(ValueError, match="An operation's name is words"):
        App("shop").add_operation(name, list_all)


def test_an_application_has_a_limited_number_of_operations() -> None:
    made = App("shop")
    for n in range(OPERATIONS_MAX):
        made.add_operation(f"queue.n{n}", list_all)
    with pytest.raises(ValueError, match="shop has 64 operations, which is the limit"):
        made.add_operation("queue.more", list_all)
