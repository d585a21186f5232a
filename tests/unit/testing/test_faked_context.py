"""`indilog.testing.context`: functions and steps called directly, with fakes of what they call."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import bokiflow
import indilog
from indilog import (
    CallOutcomeUnknownError,
    FunctionFailedError,
    InvalidArgumentsError,
    UnknownFunctionError,
)
from indilog.testing import MemoryLogs, Sent, context

pytestmark = pytest.mark.asyncio

app = indilog.App("shop")


@dataclass
class Receipt:
    """A result with a type."""

    amount: int


@app.function
async def charge(ctx: indilog.Context, card: str, amount: int) -> Receipt:
    await ctx.log("charges").append(card.encode())
    return Receipt(amount)


@app.function
def note(ctx: indilog.Context, text: str) -> int:
    return ctx.wait(ctx.log("notes").append(text.encode()))


@app.function
async def buy(ctx: indilog.Context, card: str, amount: int) -> int:
    receipt = await ctx.call(charge, card=card, amount=amount, idempotency_key="one")
    await ctx.send("shop.mail", delay=60, to=card)
    return receipt.amount


def mail(to: str) -> None:
    raise AssertionError("`send` runs nothing")


async def test_calls_go_to_fakes_whose_results_have_the_functions_type() -> None:
    def fake(card: str, amount: int) -> Receipt:
        assert card == "4242"
        return Receipt(amount + 1)

    ctx = context({charge: fake, "shop.mail": mail})
    assert await buy(ctx, "4242", 10) == 11
    assert ctx.sent == [Sent("shop.mail", {"to": "4242"}, 60, "", "sent-1")]
    assert indilog.sdk.current_context() is ctx


async def test_a_fake_may_be_a_value_an_async_function_or_the_function_itself() -> None:
    async def slow(card: str, amount: int) -> Receipt:
        return Receipt(-amount)

    logs = MemoryLogs()
    for fake, expected in ((Receipt(7), 7), (slow, -10), (charge, 10)):
        ctx = context({charge: fake, "shop.mail": mail}, logs=logs)
        assert await buy(ctx, "4242", 10) == expected
    assert len(await logs.log("charges").read_range()) == 1
    ctx = context({note: note}, logs=logs)
    seqnum = await ctx.call(note, text="sync")
    record = await ctx.log("notes").read(seqnum)
    assert record is not None
    assert record.data == b"sync"


async def test_what_is_not_faked_is_named_with_what_to_write() -> None:
    ctx = context({"shop.chrage": 1})
    with pytest.raises(UnknownFunctionError) as error:
        await buy(ctx, "4242", 10)
    assert str(error.value) == (
        "shop.charge is called, but this context has no fake of it (it has 'shop.chrage'); give "
        "one: context({'shop.charge': lambda **arguments: ...}), or the function itself."
    )
    with pytest.raises(TypeError, match="'mail' is not a function of an app"):
        context({mail: 1})


async def test_arguments_and_results_are_checked_as_on_the_platform() -> None:
    ctx = context({charge: lambda **_: "no receipt"})
    with pytest.raises(InvalidArgumentsError, match="amount"):
        await ctx.call(charge, card="4242")
    with pytest.raises(InvalidArgumentsError, match="amount"):
        await ctx.send(charge, card="4242")
    with pytest.raises(FunctionFailedError, match=r"shop\.charge"):
        await ctx.call(charge, card="4242", amount=1)


async def test_an_exception_of_a_fake_is_a_failed_function_and_a_platform_error_passes() -> None:
    def broken(error: Exception) -> object:
        def fake(**_: object) -> None:
            raise error

        return fake

    ctx = context({charge: broken(ValueError("no\nmoney."))})
    with pytest.raises(FunctionFailedError) as failed:
        await ctx.call(charge, card="4242", amount=1)
    assert str(failed.value) == "shop.charge failed: ValueError: no money."
    assert failed.value.kind == "ValueError"
    ctx = context({charge: broken(CallOutcomeUnknownError("gone"))})
    with pytest.raises(CallOutcomeUnknownError, match="gone"):
        await ctx.call(charge, card="4242", amount=1)


async def test_a_key_gives_one_outcome() -> None:
    calls: list[int] = []

    def fake(card: str, amount: int) -> Receipt:
        calls.append(amount)
        return Receipt(amount)

    ctx = context({charge: fake, "shop.mail": mail})
    for _ in range(2):
        assert await ctx.call(charge, card="1", amount=1, idempotency_key="k") == Receipt(1)
        assert await ctx.send("shop.mail", to="ann", idempotency_key="k") == "sent-1"
    assert calls == [1]
    assert len(ctx.sent) == 1
    with pytest.raises(InvalidArgumentsError, match="other arguments before"):
        await ctx.call(charge, card="1", amount=2, idempotency_key="k")


async def test_a_workflow_runs_in_it_with_steps_that_take_ctx() -> None:
    flow = bokiflow.Flow("shop")

    async def charged(ctx: indilog.Context, amount: int) -> int:
        return (await ctx.call(charge, card="4242", amount=amount)).amount

    @flow.workflow
    async def order(wf: bokiflow.Workflow, amount: int) -> int:
        return await wf.step(charged, amount) + (await wf.call(charge, card="1", amount=5)).amount

    context({charge: charge})
    assert await (await order.start(2, id="order-1")).result(timeout=30) == 7
