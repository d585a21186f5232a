"""The shop's functions and workflow over a log in memory, with services that fail; their check, and
their demo.
"""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import httpx
import pytest
from rich.console import Console

from bokistore import Store
from functions.orders import app as orders
from functions.orders import mails, sales
from functions.orders.load import Orders
from functions.orders.outside import DECLINED_CARD, UNREACHED_CITY, Services, services
from functions.orders.sales import Goods, Order, Sale, Settings
from functions.workload.demonstration import demonstrate, show
from functions.workload.replay import TraceReplay
from indilog import Context
from indilog.testing import MemoryLogs
from indilog.testing.stepper import Choose, SteppedLog, interleavings, run_stepped
from tests.unit.functions.stand_in import Functions, serving

STOCK = {"tea": Goods(500, 10), "car": Goods(100_000, 2)}
DAY = "2026-11-27"


def an_order(name: str = "o", **differs: Any) -> Order:  # noqa: ANN401 - fields
    return replace(Order(name, "ann", {"tea": 2}, "c", "Bonn"), **differs)


@dataclass
class Stock:
    """An item, as stored."""

    price: int
    pieces: int
    left: int


class Shop:
    """The shop over a log in memory, and its services."""

    def __init__(self, functions: Functions, outside: Services) -> None:
        self.functions = functions
        self.outside = outside

    def context(self) -> Context:
        return self.functions.context()

    async def sold(self, order: Order) -> Sale:
        await orders.place(self.context(), order)
        return await orders.outcome(self.context(), order.id)

    async def left(self, item: str) -> int:
        stock = await Store(self.functions.logs.log("orders")).get(f"stock:{item}")
        return Stock(**stock.value).left

    async def events(self, order: str) -> list[str]:
        found = await self.functions.logs.log("orders/events").read_range(f"order:{order}")
        return [json.loads(record.data)["status"] for record in found]

    async def waits_for_approval(self, order: str) -> None:
        log = self.functions.logs.log("orders/events")
        assert await log.read_next(f"event:{order}.waiting", wait=30) is not None

    async def mailed(self) -> None:
        """Wait until all mails are sent."""
        while (await orders.mails(self.context()))["waiting"]:  # noqa: ASYNC110 - as clients do
            await asyncio.sleep(0.02)


@asynccontextmanager
async def a_shop(
    *, failing: float = 0.0, seed: int = 1, approval_s: float = 60.0
) -> AsyncIterator[Shop]:
    with services(seed=seed, failing=failing) as outside:
        functions = Functions(orders.app)
        settings = Settings(outside.url, approval_s=approval_s, mails_per_s=1000.0)
        assert await orders.load(functions.context(), STOCK, settings) == 2
        sender = asyncio.create_task(mails.send_mails(functions.context()))
        try:
            yield Shop(functions, outside)
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)


@pytest.mark.asyncio
async def test_an_order_is_paid_shipped_mailed_and_published() -> None:
    async with a_shop() as shop:
        sale = await shop.sold(an_order())
        await shop.mailed()
        assert (sale.status, sale.total, await shop.left("tea")) == ("paid", 1000, 8)
        assert await shop.events("o") == ["accepted", "charged", "paid"]
        book = shop.outside.book
        assert (book.taken("o"), book.shipped["o"]) == (1000, 1)
        assert dict(book.mails) == {("o", "paid"): 1}


@pytest.mark.asyncio
async def test_an_order_that_is_placed_again_is_sold_once() -> None:
    async with a_shop() as shop:
        again = [orders.place(shop.context(), an_order()) for _ in range(4)]
        assert await asyncio.gather(*again) == ["o"] * 4
        await shop.sold(an_order(lines={"tea": 9}))  # the first one counts
        assert await shop.left("tea") == 8
        assert shop.outside.book.charged == {"o": [1000]}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("differs", "why", "undone"),
    [
        ({"lines": {"tea": 11}}, "out of stock: tea", []),
        ({"lines": {"tea": 1, "gold": 1}}, "out of stock: gold", []),
        ({"card": DECLINED_CARD}, "the card was declined", ["accepted"]),
        ({"city": UNREACHED_CITY}, "no carrier delivers to Atlantis", ["accepted", "charged"]),
    ],
)
async def test_a_refused_order_leaves_neither_money_nor_parcel_nor_pieces(
    differs: dict[str, Any], why: str, undone: list[str]
) -> None:
    async with a_shop() as shop:
        sale = await shop.sold(an_order(**differs))
        await shop.mailed()
        assert (sale.status, sale.why, sale.holds) == ("rejected", why, False)
        assert await shop.left("tea") == 10
        assert await shop.events("o") == [*undone, "rejected"]
        book = shop.outside.book
        assert (book.taken("o"), book.shipped["o"]) == (0, 0)
        assert dict(book.mails) == {("o", "rejected"): 1}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("approve", "end"), [(True, ("paid", "")), (False, ("rejected", "not approved"))]
)
async def test_a_person_decides_about_a_large_order(approve: bool, end: tuple[str, str]) -> None:
    async with a_shop() as shop:
        await orders.place(shop.context(), an_order(lines={"car": 1}))
        await shop.waits_for_approval("o")
        assert shop.outside.book.charged == {}, "nothing is charged before"
        for decision in (approve, not approve):  # the first one counts
            assert await orders.decide(shop.context(), "o", decision)
        sale = await orders.outcome(shop.context(), "o")
        assert (sale.status, sale.why) == end
        assert not await orders.decide(shop.context(), "o", approve=True), "it is too late"
        await shop.mailed()
        assert set(shop.outside.book.mails) == {("o", "waiting"), ("o", end[0])}


@pytest.mark.asyncio
async def test_an_order_without_an_approval_in_time_is_cancelled() -> None:
    async with a_shop(approval_s=0.05) as shop:
        sale = await shop.sold(an_order(lines={"car": 1}))
        assert (sale.status, sale.why) == ("cancelled", "not approved in time")
        assert await shop.left("car") == 2


@pytest.mark.asyncio
async def test_a_customer_cancels_an_order_that_waits_and_not_one_that_is_paid() -> None:
    async with a_shop() as shop:
        await orders.place(shop.context(), an_order(lines={"car": 1}))
        await shop.waits_for_approval("o")
        assert await orders.cancel(shop.context(), "o")
        sale = await orders.outcome(shop.context(), "o")
        assert (sale.status, sale.why) == ("cancelled", "cancelled by the customer")
        assert await shop.left("car") == 2
        assert (await shop.sold(an_order("p"))).status == "paid"
        assert not await orders.cancel(shop.context(), "p")
        assert (await orders.show(shop.context(), "p")).status == "paid"


@pytest.mark.asyncio
async def test_a_cancellation_at_any_time_leaves_all_or_nothing() -> None:
    async with a_shop(failing=0.3) as shop:

        async def cancelled(number: int) -> Sale:
            await orders.place(shop.context(), an_order(f"o{number}", lines={"tea": 1}))
            await asyncio.sleep(number * 0.01)
            await orders.cancel(shop.context(), f"o{number}")
            return await orders.outcome(shop.context(), f"o{number}")

        sold = await asyncio.gather(*[cancelled(number) for number in range(20)])
        book = shop.outside.book
        paid = [sale for sale in sold if sale.status == "paid"]
        assert {sale.status for sale in sold} <= {"paid", "cancelled", "rejected"}
        assert await shop.left("tea") == 10 - len(paid)
        for sale in sold:
            is_paid = sale.status == "paid"
            assert (book.taken(sale.id), book.shipped[sale.id]) == (500 * is_paid, is_paid)
            assert (await shop.events(sale.id))[-1] == sale.status


@pytest.mark.asyncio
async def test_services_that_fail_often_charge_ship_and_mail_once() -> None:
    async with a_shop(failing=0.35, seed=4) as shop:
        sold = [shop.sold(an_order(f"flaky{n}", lines={"tea": 1})) for n in range(6)]
        assert {sale.status for sale in await asyncio.gather(*sold)} == {"paid"}
        await shop.mailed()
        book = shop.outside.book
        assert book.repeated, "some answers were lost"
        assert book.charged == {f"flaky{n}": [500] for n in range(6)}
        assert dict(book.shipped) == {f"flaky{n}": 1 for n in range(6)}


@pytest.mark.asyncio
@pytest.mark.parametrize("service", ["payments", "parcels"])
async def test_what_a_service_did_without_an_answer_is_undone(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "SERVICE_RETRIES", 1)
    async with a_shop() as shop:
        real = shop.outside.handle

        def handle(what: str, key: str, asked: dict[str, Any]) -> dict[str, str] | None:
            answer = real(what, key, asked)
            return None if what == service else answer

        shop.outside.handle = handle  # type: ignore[method-assign]
        sale = await shop.sold(an_order())
        assert sale.status == "rejected"
        assert f"{service} failed" in sale.why
        book = shop.outside.book
        assert book.charged == {"o": [1000]}
        assert (service == "parcels") is ("o" in book.shipped)
        assert (book.taken("o"), book.shipped["o"]) == (0, 0)


@pytest.mark.asyncio
async def test_a_step_that_runs_again_publishes_nothing_and_mails_nothing_again() -> None:
    async with a_shop() as shop:
        await shop.sold(an_order())
        for _ in range(3):
            assert await orders.announce(shop.context(), "o") == "paid"
            await orders.tell(shop.context(), "o", "waiting")  # late, in a paused process
        await shop.mailed()
        assert await shop.events("o") == ["accepted", "charged", "paid"]
        assert dict(shop.outside.book.mails) == {("o", "paid"): 1}
        assert shop.outside.book.repeated == 3


def finished_and_undone(choose: Choose) -> tuple[list[bool], Any]:
    """Run the end of a sale beside its cancellation."""
    logs = MemoryLogs()
    log = logs.log("orders")
    setup = Store(log)

    async def prepared() -> None:
        await setup.set("order:o", "", {"status": "charged"})

    run_stepped([prepared()], lambda ready: ready[0])

    def ran(body: Callable[..., Coroutine[Any, Any, bool]]) -> Coroutine[Any, Any, bool]:
        return Store(SteppedLog(log)).transact(partial(body, order="o"))

    results = run_stepped([ran(sales.finish), ran(sales.begin_undo)], choose)
    (order,) = run_stepped([setup.get("order:o")], lambda ready: ready[0])
    return results, order["status"]


def test_an_order_is_either_finished_or_undone_in_every_interleaving() -> None:
    seen = set()
    for (finished, undone), status in interleavings(finished_and_undone):
        seen.add(status)
        assert (finished, undone) == ((True, False) if status == "paid" else (False, True))
    assert seen == {"paid", "undoing"}


@pytest.mark.asyncio
async def test_pieces_are_put_back_once_however_often_that_runs() -> None:
    functions = Functions(orders.app)
    await orders.load(functions.context(), STOCK)
    store = Store(functions.logs.log("orders"))
    accepted = await store.transact(partial(sales.accept, order=an_order()))
    assert accepted == await store.transact(partial(sales.accept, order=an_order())), "known"
    for _ in range(3):
        await store.transact(partial(sales.put_back, order=an_order()))
        assert (await store.get("stock:tea"))["left"] == 10


@pytest.mark.asyncio
async def test_orders_are_found_by_customer_and_show_no_card() -> None:
    async with a_shop() as shop:
        for name, customer in (("a", "ann"), ("b", "bob"), ("c", "ann")):
            await shop.sold(an_order(name, customer=customer, card="secret-card"))
        found = await orders.orders_of(shop.context(), "ann")
        assert [sale.id for sale in found] == ["a", "c"]
        assert await orders.orders_of(shop.context(), "zoe") == []
        shown = await orders.objects(shop.context(), ["order:a", "order:x"])
        assert shown[1] is None
        assert "secret-card" not in json.dumps(shown) + repr(found)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"name": "a b"}, "id must be 1 to 64 letters"),
        ({"name": "x" * 65}, "id must be 1 to 64 letters"),
        ({"customer": ""}, "A customer must be 1 to 128"),
        ({"lines": {}}, "has 1 to 20 lines, not 0"),
        ({"lines": {str(n): 1 for n in range(21)}}, "has 1 to 20 lines, not 21"),
        ({"lines": {"tea": 0}}, "at least one piece"),
    ],
)
async def test_an_invalid_order_is_refused_with_one_sentence(
    wrong: dict[str, Any], sentence: str
) -> None:
    functions = Functions(orders.app)
    with pytest.raises(ValueError, match=sentence):
        await orders.place(functions.context(), an_order(**wrong))
    assert await functions.logs.log("orders/flow").tail() == 0


@pytest.mark.asyncio
async def test_an_unknown_order_is_refused_by_each_function() -> None:
    functions = Functions(orders.app)
    for asked in (
        orders.show(functions.context(), "x"),
        orders.outcome(functions.context(), "x"),
        orders.decide(functions.context(), "x", approve=True),
        orders.cancel(functions.context(), "x"),
    ):
        with pytest.raises(LookupError, match="There is no order 'x'; place it first"):
            await asked


@pytest.mark.asyncio
async def test_invalid_stock_and_settings_are_refused() -> None:
    functions = Functions(orders.app)
    for goods, settings, sentence in (
        ({str(n): Goods(1, 1) for n in range(31)}, None, "at most 30 items"),
        ({"tea": Goods(-1, 1)}, None, "must not be negative"),
        ({}, Settings(mails_per_s=0), "must be more than 0"),
        ({}, Settings(approval_s=0), "must be more than 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            await orders.load(functions.context(), goods, settings)
    assert await orders.load(functions.context(), STOCK) == 2
    assert await orders.load(functions.context(), STOCK) == 0


def test_mails_keep_to_the_rate() -> None:
    pace = mails.Pace()
    assert [pace.pause_s(100.0, 4.0) for _ in range(4)] == [0.0, 0.25, 0.5, 0.75]
    assert pace.pause_s(100.5, 4.0) == 0.5
    assert pace.pause_s(200.0, 4.0) == 0.0
    assert pace.pause_s(200.0, 1.0) == 0.25, "pauses before this one do not add up"


@pytest.mark.asyncio
async def test_of_all_processes_one_sends_the_mails_each_in_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: list[tuple[mails.Pace, float]] = []

    class Noted(mails.Pace):
        def pause_s(self, now: float, rate: float) -> float:
            turns.append((self, rate))
            return super().pause_s(now, rate)

    monkeypatch.setattr(mails, "Pace", Noted)
    async with a_shop() as shop:
        others = [asyncio.create_task(mails.send_mails(shop.context())) for _ in range(2)]
        await asyncio.gather(*[shop.sold(an_order(f"m{n}", lines={"tea": 1})) for n in range(8)])
        await shop.mailed()
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        assert sum(shop.outside.book.mails.values()) == len(turns) == 8
        assert {rate for _, rate in turns} == {1000.0}
        assert len({id(pace) for pace, _ in turns}) == 1


@pytest.mark.asyncio
async def test_mails_wait_until_the_mail_service_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mails, "TRIES", 1)
    async with a_shop() as shop:
        real = shop.outside.handle
        failed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def handle(what: str, key: str, asked: dict[str, Any]) -> dict[str, str] | None:
            if what == "mails":
                loop.call_soon_threadsafe(failed.set)
                return None
            return real(what, key, asked)

        shop.outside.handle = handle  # type: ignore[method-assign]
        await shop.sold(an_order())
        await failed.wait()
        await shop.mailed()
        assert await orders.mails(shop.context()) == {"waiting": 0, "given_up": 1}
        shop.outside.handle = real  # type: ignore[method-assign]
        assert await orders.send_again(shop.context()) == 1
        await shop.mailed()
        assert dict(shop.outside.book.mails) == {("o", "paid"): 1}


@pytest.mark.asyncio
async def test_the_report_counts_the_orders_of_a_day_by_the_time_of_the_log() -> None:
    async with a_shop() as shop:
        now = shop.functions.logs.log("orders/events").now

        async def day() -> str:
            return time.strftime("%Y-%m-%d", time.gmtime(await now()))

        before = await day()
        await shop.sold(an_order("a"))
        await shop.sold(an_order("b", card=DECLINED_CARD))
        today = await day()
        if before != today:
            pytest.skip("a day ended meanwhile")
        told = await orders.report(shop.context(), today)
        assert told == {"paid": 1, "rejected": 1, "cancelled": 0, "revenue": 1000}
        [kept] = await orders.objects(shop.context(), [f"report:{today}"])
        assert kept == told
        yesterday = await orders.report(shop.context())
        assert yesterday == {"paid": 0, "rejected": 0, "cancelled": 0, "revenue": 0}


@pytest.mark.asyncio
async def test_ended_orders_are_collected_only_if_a_time_is_set() -> None:
    async with a_shop() as shop:
        await shop.sold(an_order("old"))
        await shop.mailed()
        assert await orders.collect(shop.context()) == 0
        await orders.load(shop.context(), {}, Settings(services=shop.outside.url, keep_days=0))
        await orders.place(shop.context(), an_order("open", lines={"car": 1}))
        await shop.waits_for_approval("open")
        assert await orders.collect(shop.context()) == 1
        assert await orders.collect(shop.context()) == 0, "once"
        assert await orders.objects(shop.context(), ["order:old"]) == [None]
        with pytest.raises(LookupError, match="'old' ended long ago, and was deleted"):
            await orders.show(shop.context(), "old")
        assert [one.id for one in await orders.orders_of(shop.context(), "ann")] == ["open"]
        await orders.decide(shop.context(), "open", approve=True)
        assert (await orders.outcome(shop.context(), "open")).status == "paid"


@pytest.mark.asyncio
async def test_the_services_give_the_first_answer_again_and_refuse_bad_requests() -> None:
    with services(failing=0.0) as outside:
        async with httpx.AsyncClient(base_url=outside.url) as http:

            async def ask(what: str, key: str, **content: object) -> httpx.Response:
                headers = {"idempotency-key": key} if key else {}
                return await http.post(what, json=content, headers=headers)

            pays = {"order": "o", "card": "c", "amount": 5}
            first = await ask("payments", "k", **pays)
            again = await ask("payments", "k", **(pays | {"amount": 9}))
            assert first.json() == again.json()
            assert (outside.book.taken("o"), outside.book.repeated) == (5, 1)
            assert "id" in (await ask("refunds", "r", order="o")).json()
            assert (await ask("payments", "late", **pays)).json() == {
                "refused": "the order's payments were undone"
            }
            assert outside.book.taken("o") == 0
            for answer in (
                await ask("payments", "", **pays),
                await ask("payments", "x" * 256, **pays),
                await ask("payments", "y", order="p"),
                await ask("nothing", "z", order="o"),
            ):
                assert answer.status_code == 400


@pytest.mark.asyncio
async def test_the_demo_retries_failed_requests_and_finds_no_fault() -> None:
    async with serving(orders.app) as gateway:
        lost = iter(range(4))  # the first request of each client

        def tamper(function: str, result: bytes) -> bytes | tuple[int, bytes]:
            if function in Orders.functions and next(lost, 1) % 3 == 0:
                return 500, b'{"detail":"The worker died.","retryable":false}'
            return result

        gateway.tamper = tamper
        console = Console(file=io.StringIO(), width=160)
        sender = asyncio.create_task(mails.send_mails(gateway.functions.context()))
        with services(failing=0.2) as outside:
            application = Orders(outside, items=6, customers=3, pieces=4, approval_s=0.1)
            outcome = await demonstrate(
                gateway.url,
                application,
                seconds=0.4,
                clients=4,
                seed=1,
                requests_min=30,
                console=console,
            )
            show(application, outcome, console)
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
        assert outcome.faults == []
        assert outcome.run.all.failures["The worker died."] == 2
        assert set(application.acknowledged) == set(application.placed)
        assert isinstance(console.file, io.StringIO)
        assert "none twice" in " ".join(console.file.getvalue().split())


def a_paid_order() -> tuple[Orders, TraceReplay]:
    """Return what is there after one order was paid and one rejected."""
    application = Orders(Services(seed=1, failing=0.0), items=1)
    application.placed = {"o": "ann", "p": "ann"}
    application.acknowledged = {"o": "paid", "p": "rejected"}
    application.events.update({("o", "accepted"): 1, ("o", "paid"): 1, ("p", "rejected"): 1})
    application.found = {"ann": ["o", "p"]}
    book = application.services.book
    book.charged = {"o": [500]}
    book.shipped["o"] = 1
    book.mails.update({("o", "paid"): 1, ("p", "rejected"): 1})
    replay = TraceReplay()
    sale = {"customer": "ann", "lines": {"tea": 1}, "total": 500}
    for seqnum, writes in enumerate(
        [
            {"stock:tea": [["set", [], {"price": 500, "pieces": 2, "left": 2}]]},
            {
                "stock:tea": [["increment", ["left"], -1]],
                "order:o": [["set", [], {"id": "o", **sale, "status": "accepted", "holds": True}]],
            },
            {"order:o": [["set", ["status"], "paid"]]},
            {"order:p": [["set", [], {"id": "p", **sale, "status": "rejected", "holds": False}]]},
        ]
    ):
        replay.add(seqnum, json.dumps({"writes": writes}))
    return application, replay


def write(replay: TraceReplay, name: str, *changes: list[Any]) -> None:
    for change in changes:
        replay.add(100 + replay.records, json.dumps({"writes": {name: [change]}}))


def test_the_check_accepts_what_must_be_there() -> None:
    application, replay = a_paid_order()
    assert application.faults(replay) == []
    assert "1 were paid, 1 were rejected, 0 were cancelled" in application.verdict(replay)


@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        (lambda _, replay: write(replay, "order:p", ["set", ["status"], "waiting"]),
         "Order p has not ended: its status is waiting."),
        (lambda _, replay: write(replay, "order:p", ["set", ["status"], "cancelled"]),
         "Order p went on after its end: rejected, cancelled."),
        (lambda shop, _: shop.acknowledged.update({"o": "cancelled"}),
         "Order o ended as paid, but its client read cancelled."),
        (lambda shop, _: shop.placed.update({"q": "ann"}),
         "Order q has not ended: its status is None."),
        (lambda _, replay: write(replay, "order:o", ["set", ["holds"], False]),
         "Order o is paid, and holds is False."),
        (lambda _, replay: write(replay, "stock:tea", ["increment", ["left"], -1]),
         "stock:tea had 2 and has 0 left, but orders hold 1."),
        (lambda _, replay: write(
            replay, "stock:tea", ["increment", ["left"], -2], ["increment", ["left"], 2]),
         "stock:tea had -1 left."),
        (lambda shop, _: shop.services.book.charged.update({"o": [500, 500]}),
         "Order o was charged 2 times."),
        (lambda shop, _: shop.services.book.refunded.update({"o": 500}),
         "Order o has (0, 1) cents and parcels outside, but should have (500, 1)."),
        (lambda shop, _: shop.services.book.shipped.update({"p": 1}),
         "Order p has (0, 1) cents and parcels outside, but should have (0, 0)."),
        (lambda shop, _: shop.services.book.charged.update({"x": [1]}),
         "The payment service charged order x, which no client placed."),
        (lambda shop, _: shop.services.book.mails.update({("o", "paid"): 1}),
         "The mail that order o is paid was sent 2 times."),
        (lambda shop, _: shop.services.book.mails.pop(("p", "rejected")),
         "The mail that order p is rejected was not sent."),
        (lambda shop, _: shop.services.book.mails.update({("o", "cancelled"): 1}),
         "A mail says that order o is cancelled, which it is not."),
        (lambda shop, _: shop.events.update({("o", "accepted"): 1}),
         "The event that order o is accepted is in the log 2 times."),
        (lambda shop, _: shop.events.update({("o", "cancelled"): 1}),
         "Order o is paid, but its published ends are {'paid': 1, 'cancelled': 1}."),
        (lambda shop, _: shop.found.update({"ann": ["o"]}),
         "ann has the orders ['o', 'p'], but ['o'] are shown."),
        (lambda shop, _: shop.mails.update({"given_up": 2}), "2 mails were given up."),
    ],
)  # fmt: skip
def test_the_check_detects_each_broken_guarantee(
    plant: Callable[[Orders, TraceReplay], None], fault: str
) -> None:
    application, replay = a_paid_order()
    plant(application, replay)
    assert fault in application.faults(replay)
