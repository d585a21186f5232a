"""The functions and the workflow of the shop: place, show, approve and cancel orders.

`order_to_cash` sells one order: take the stock, wait for an approval if the order is large, charge
the card, hand over the parcel. If a part fails, or the customer cancels, all parts begun so far are
undone in reverse order. The id of the order is the id of its run, so an order is sold once, however
often it is placed.

The state is in four logs: `orders` (BokiStore objects: `order:{id}`, `stock:{item}`, `settings`,
`report:{day}`), `orders/events`, `orders/mail` (a queue) and `orders/locks`. The runs are in
`orders/flow`.
"""

from __future__ import annotations

import asyncio
import functools
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from bokiflow import (
    Cancelled,
    Flow,
    RunEndedError,
    RunFailedError,
    State,
    StepFailedError,
    UnknownRunError,
    Workflow,
)
from bokistore import Store, Transaction
from indilog import App, Context

from . import sales, services
from .events import EVENTS_LOG, ended_between, publish, summary_between
from .mails import push_mail, queue_of, send_mails
from .sales import (
    CANCELLED,
    CHARGED,
    ENDED,
    LOG,
    REJECTED,
    WAITING,
    Goods,
    Order,
    Sale,
    Settings,
    check_name,
    check_order,
    settings_of,
    store_of,
)

app = App("orders")
flow = Flow(app)
app.add_service(send_mails, name="mails")

LOADED_MAX: Final = 30
"""Items loaded by one record, which has at most 64 tags."""
OBJECTS_SHOWN_MAX: Final = 1000
SERVICE_RETRIES: Final = 9
"""Further attempts of a payment or parcel; the pauses between them are 51 s together."""
_DAY_S: Final = 86_400.0


class OrderRefused(Exception):  # noqa: N818 - an outcome of an order
    """The order cannot be sold.

    Attributes:
        ends: the status in which the order ends.
    """

    def __init__(self, ends: str, why: str) -> None:
        super().__init__(why)
        self.ends = ends


# --- functions


@app.function
async def place(ctx: Context, order: Order) -> str:  # noqa: ARG001 - the run uses its context
    """Place an order; return its id. Placing an order again, with the same id, changes nothing."""
    check_order(order)
    return (await order_to_cash.start(order, id=order.id)).id


@app.function
async def show(ctx: Context, order: str) -> Sale:
    """Return an order and its status."""
    sale = await store_of(ctx).get(f"order:{order}", Sale)
    if sale is not None:
        return sale
    try:
        status = await order_to_cash.handle(order).status()
    except UnknownRunError:
        raise _unknown(order) from None
    if status.state not in {State.RUNNING, State.PARKED}:
        raise LookupError(f"Order {order!r} ended long ago, and was deleted.")
    return Sale(order, "", {}, "")  # its run has not stored it yet


@app.function
async def outcome(ctx: Context, order: str, wait_s: float = 30.0) -> Sale:
    """Wait until an order has ended, at most `wait_s` seconds, and return it."""
    try:
        await order_to_cash.handle(order).result(wait_s)
    except UnknownRunError:
        raise _unknown(order) from None
    except (RunFailedError, TimeoutError):
        ctx.logger.debug("the order was not sold, or not yet", order=order)
    return await show(ctx, order)


@app.function
async def decide(ctx: Context, order: str, approve: bool) -> bool:  # noqa: ARG001, FBT001
    """Approve or decline a large order; return False if it has ended. The first decision counts."""
    try:
        await order_to_cash.handle(order).signal("approval", approve, key="approval")
    except UnknownRunError:
        raise _unknown(order) from None
    except RunEndedError:
        return False
    return True


@app.function
async def cancel(ctx: Context, order: str) -> bool:  # noqa: ARG001 - the handle uses it
    """Ask to cancel an order; return False if it has ended. An order that is paid first stays
    paid.
    """
    try:
        await order_to_cash.handle(order).cancel()
    except UnknownRunError:
        raise _unknown(order) from None
    except RunEndedError:
        return False
    return True


@app.function
async def orders_of(ctx: Context, customer: str) -> list[Sale]:
    """Return the orders of a customer, by their ids."""
    found = await store_of(ctx).find(f"customer:{customer}")
    return [Sale(**found[name].value) for name in sorted(found)]


@app.function
async def load(ctx: Context, goods: dict[str, Goods], settings: Settings | None = None) -> int:
    """Add items to the stock, and replace the settings if `settings` is given; return how many
    items are new. Known items keep price and stock.
    """
    if len(goods) > LOADED_MAX:
        raise ValueError(f"Load at most {LOADED_MAX} items per call, not {len(goods)}.")
    for item, one in goods.items():
        check_name("item", item)
        if one.price < 0 or one.pieces < 0:
            raise ValueError(f"Price and pieces of {item!r} must not be negative.")
    if settings is not None and min(settings.mails_per_s, settings.approval_s) <= 0:
        raise ValueError("mails_per_s and approval_s must be more than 0.")

    async def body(txn: Transaction) -> int:
        if settings is not None:
            txn.put("settings", settings)
        found = [await txn.get(f"stock:{item}") for item in goods]
        new = [obj for obj in found if not obj]
        for obj in new:
            one = goods[obj.name.removeprefix("stock:")]
            obj.set("", {"price": one.price, "pieces": one.pieces, "left": one.pieces})
        return len(new)

    return await store_of(ctx).transact(body)


@app.function
async def mails(ctx: Context) -> dict[str, int]:
    """Return how many mails wait in the queue, and how many were given up."""
    stats = await queue_of(ctx).stats()
    return {"waiting": stats.depth, "given_up": stats.dead}


@app.function
async def send_again(ctx: Context) -> int:
    """Put mails that were given up into the queue again; return how many."""
    queue = queue_of(ctx)
    return sum([await queue.revive(seqnum) for seqnum, _ in await queue.dead_letters()])


@app.schedule("5 0 * * *")
@app.function(timeout_s=600)
async def report(ctx: Context, day: str = "") -> dict[str, int]:
    """Store and return how many orders ended on a day (UTC), and the revenue in cents.

    Args:
        ctx: the context of the function.
        day: the day, such as `2026-11-27`; default: yesterday, by the time of the log.
    """
    if not day:
        now = datetime.fromtimestamp(await ctx.log(EVENTS_LOG).now(), UTC)
        day = (now - timedelta(days=1)).date().isoformat()
    start = datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()
    summary = await summary_between(ctx, start, start + _DAY_S)
    await store_of(ctx).put(f"report:{day}", summary)
    return summary


@app.schedule("17 3 * * *")
@app.function(timeout_s=3600)
async def collect(ctx: Context) -> int:
    """Delete orders that ended more than `keep_days` ago, and older history of all objects; return
    how many orders were deleted. Without the setting `keep_days`, nothing is deleted.
    """
    store = store_of(ctx)
    keep_days = (await settings_of(store)).keep_days
    if keep_days is None:
        return 0
    log = ctx.log(EVENTS_LOG)
    end = await log.now() - keep_days * _DAY_S
    deleted = 0
    async for event in ended_between(ctx, None, end):
        await store.delete(f"order:{event['order']}")
        deleted += 1
    await log.trim(await log.find_time(end))
    await store.collect(keep=max(1.0, keep_days * _DAY_S))
    return deleted


@app.function
async def objects(ctx: Context, names: list[str]) -> list[dict[str, Any] | None]:
    """Return the values of objects in the store, None for those that do not exist."""
    if len(names) > OBJECTS_SHOWN_MAX:
        raise ValueError(f"Ask for at most {OBJECTS_SHOWN_MAX} objects, not {len(names)}.")
    store = store_of(ctx)
    found = await asyncio.gather(*[store.get(name) for name in names])
    return [obj.value if obj else None for obj in found]


# --- the workflow


@flow.workflow
async def order_to_cash(wf: Workflow, order: Order) -> str:
    """Sell an order, or undo all that was done for it; return its last status."""

    async def end(ctx: Context) -> None:
        await store_of(ctx).transact(functools.partial(sales.end_undone, order=order))
        await announce(ctx, order.id)

    wf.compensate(end)  # the first compensation runs last
    try:
        await sell(wf, order)
    except (OrderRefused, StepFailedError) as error:
        ends = error.ends if isinstance(error, OrderRefused) else REJECTED
        why = str(error)

        async def note(txn: Transaction) -> None:
            await sales.note_refusal(txn, order.id, ends, why)

        await wf.transact(Store(wf.log(LOG)), note)
        raise Cancelled(why) from error  # runs the compensations
    return await wf.step(announce, order.id)


async def sell(wf: Workflow, order: Order) -> None:
    """Do the parts of a sale, one after the other.

    Each compensation is registered before the part that it undoes, because a request whose answers
    were all lost may have taken effect.

    Raises:
        OrderRefused: a person or a service refused.
        StepFailedError: a service failed in all attempts.
    """
    store = Store(wf.log(LOG))

    async def accept(txn: Transaction) -> Sale:
        return await sales.accept(txn, order)

    async def put_back() -> None:
        await store.transact(functools.partial(sales.put_back, order=order))

    async def finish(txn: Transaction) -> bool:
        return await sales.finish(txn, order.id)

    wf.compensate(put_back)
    sale = await wf.transact(store, accept)
    if sale.status in ENDED:  # out of stock
        return
    await wf.step(tell, order.id, sale.status)
    if sale.approval_s:
        await approve(wf, sale)
    await charge(wf, store, sale, order.card)
    await ship(wf, store, sale)
    if not await wf.transact(store, finish):
        raise OrderRefused(CANCELLED, "another execution of this run undoes it")


async def approve(wf: Workflow, sale: Sale) -> None:
    """Ask a person, and wait for the answer."""
    await wf.step(tell, sale.id, WAITING)
    approved = await wf.signal("approval", timeout=sale.approval_s)
    if approved is None:
        raise OrderRefused(CANCELLED, "not approved in time")
    if not approved:
        raise OrderRefused(REJECTED, "not approved")


async def charge(wf: Workflow, store: Store, sale: Sale, card: str) -> None:
    """Take the money. `wf.key` is the same in every attempt, so the money is taken once."""

    async def refund() -> None:
        if await store.transact(functools.partial(sales.begin_undo, order=sale.id)):
            await services.refund(store, sale.id, wf.key)

    async def pay() -> services.ServiceAnswer:
        return await services.charge(store, sale, card, wf.key)

    wf.compensate(refund)
    payment = await wf.step(pay, retries=SERVICE_RETRIES)
    if payment.refused:
        raise OrderRefused(REJECTED, payment.refused)
    await wf.step(tell, sale.id, CHARGED)


async def ship(wf: Workflow, store: Store, sale: Sale) -> None:
    """Hand the parcel to the carrier."""

    async def recall() -> None:
        if await store.transact(functools.partial(sales.begin_undo, order=sale.id)):
            await services.recall(store, sale.id, wf.key)

    async def hand_over() -> services.ServiceAnswer:
        return await services.ship(store, sale, wf.key)

    wf.compensate(recall)
    parcel = await wf.step(hand_over, retries=SERVICE_RETRIES)
    if parcel.refused:
        raise OrderRefused(REJECTED, parcel.refused)


async def tell(ctx: Context, order: str, status: str) -> None:
    """Give an order its next status, mail it and publish it. A repetition gives the same status,
    publishes nothing, and pushes a mail that the mail service does not send again.
    """
    advance = functools.partial(sales.advance, order=order, status=status)
    sale = await store_of(ctx).transact(advance)
    if sale is not None:
        await push_mail(ctx, sale, status)
        await publish(ctx, sale, status)


async def announce(ctx: Context, order: str) -> str:
    """Mail and publish the last status of an order, and return it."""
    sale = await store_of(ctx).get(f"order:{order}", Sale)
    assert sale is not None, "an order that has ended is stored"
    assert sale.status in ENDED, "the order has ended"
    await push_mail(ctx, sale, sale.status)
    await publish(ctx, sale, sale.status)
    return sale.status


def _unknown(order: str) -> LookupError:
    return LookupError(f"There is no order {order!r}; place it first.")
