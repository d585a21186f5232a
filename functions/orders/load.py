"""The load of the shop: stock, customers who order, a clerk who approves, and the check. The demo
runs it by `workload.demonstration`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, Final

import httpx

from functions.orders.app import LOADED_MAX
from functions.orders.events import EVENTS_LOG
from functions.orders.outside import DECLINED_CARD, UNREACHED_CITY, Book, Services
from functions.workload.http_connection import HttpConnection
from functions.workload.load import LoadError, LoadRequest, Visitor, call, load_batches
from functions.workload.replay import TraceReplay
from indilog import reach

ITEMS: Final = 100
CUSTOMERS: Final = 200
PIECES: Final = 50
APPROVAL_S: Final = 1.0
MAILS_PER_S: Final = 300.0
_DEAR_CENTS: Final = 60_000
_CHEAP_CENTS: Final = 900
_APPROVAL_ABOVE_CENTS: Final = 50_000
_EVENTS_PATH: Final = EVENTS_LOG.replace("/", "%2F")
_ENDS: Final = ("paid", "rejected", "cancelled")
_CHECKERS: Final = 8
_PAGE: Final = 1000
_MAILS_S_MAX: Final = 120.0
_POLL_S: Final = 0.1


class Orders:
    """The application `orders` with its services; see `workload.demonstration`.

    Attributes:
        services: the services outside of the platform; their book is compared with the log.
        placed: by order id, the customer of each order of these clients, acknowledged or not.
        acknowledged: by order id, the status of each order whose end a client has read.
        unknown: requests that failed and may have taken effect; clients repeat them.
        events: how often the log has an event (order, status).
        found: by customer, the ids of orders that a lookup by customer found.
        mails: after the load, mails that wait and mails that were given up.
    """

    name = "orders"
    functions = ("place", "decide", "cancel", "outcome", "orders_of")
    loads = "stock"

    def __init__(
        self,
        services: Services,
        *,
        items: int = ITEMS,
        customers: int = CUSTOMERS,
        pieces: int = PIECES,
        approval_s: float = APPROVAL_S,
    ) -> None:
        self.services = services
        self.pieces = pieces
        self.approval_s = approval_s
        self.goods = {
            f"item {number}": _DEAR_CENTS if number % 5 == 0 else _CHEAP_CENTS + number
            for number in range(items)
        }
        self.customers = [f"customer {number}" for number in range(customers)]
        self.placed: dict[str, str] = {}
        self.acknowledged: dict[str, str] = {}
        self.unknown: dict[str, LoadRequest] = {}
        self.events: Counter[tuple[str, str]] = Counter()
        self.found: dict[str, list[str]] = {}
        self.mails = {"waiting": 0, "given_up": 0}

    def batches(self) -> int:
        """See `Application`."""
        return len(self._batches())

    def _batches(self) -> list[dict[str, Any]]:
        settings = {
            "services": self.services.url,
            "approval_above": _APPROVAL_ABOVE_CENTS,
            "approval_s": self.approval_s,
            "mails_per_s": MAILS_PER_S,
        }
        goods = [
            (item, {"price": price, "pieces": self.pieces}) for item, price in self.goods.items()
        ]
        parts = [dict(goods[n : n + LOADED_MAX]) for n in range(0, len(goods), LOADED_MAX)]
        return [
            {"goods": part, "settings": settings} if number == 0 else {"goods": part}
            for number, part in enumerate(parts)
        ]

    async def load(self, url: str, report: Callable[[int], None]) -> str:
        """Load settings and stock; known items keep their remaining pieces."""
        new = sum(await load_batches(url, self.name, self._batches(), report))
        return f"{len(self.goods)} items ({new:,} new)"

    def visitors(self, count: int, seed: int) -> list[Visitor]:
        """See `Application`."""
        now = time.time_ns()
        return [Customer(self, f"{seed}.{now}.{number}", seed + number) for number in range(count)]

    async def settle(self, url: str) -> None:
        """Wait until each order has ended and each mail was sent; then collect what the check
        compares: events, and lookups by customer.
        """
        open_orders = iter([order for order in self.placed if order not in self.acknowledged])
        await asyncio.gather(*[self._wait_for_ends(url, open_orders) for _ in range(_CHECKERS)])
        self.unknown.clear()
        await self._wait_for_mails(url)
        self.events = Counter([event async for event in _events(url)])
        customers = iter(sorted(set(self.placed.values())))
        await asyncio.gather(*[self._look_up(url, customers) for _ in range(_CHECKERS)])

    async def _wait_for_ends(self, url: str, orders: Iterator[str]) -> None:
        """Wait for the ends of orders; place orders whose first request never arrived."""
        connection = HttpConnection(url)
        try:
            for order in orders:
                if (lost := self.unknown.get(order)) is not None and lost.function == "place":
                    await call(connection, self.name, "place", lost.arguments)
                status = ""
                while status not in _ENDS:
                    sale = await call(connection, self.name, "outcome", {"order": order})
                    status = sale["status"]
                self.acknowledged[order] = status
        finally:
            connection.close()

    async def _wait_for_mails(self, url: str) -> None:
        connection = HttpConnection(url)
        try:
            until = time.monotonic() + _MAILS_S_MAX
            self.mails = await call(connection, self.name, "mails", {})
            while self.mails["waiting"]:
                if time.monotonic() > until:
                    raise LoadError(f"Mails still wait after {_MAILS_S_MAX:.0f} s: {self.mails}.")
                await asyncio.sleep(_POLL_S)  # nothing announces that a queue is empty
                self.mails = await call(connection, self.name, "mails", {})
        finally:
            connection.close()

    async def _look_up(self, url: str, customers: Iterator[str]) -> None:
        connection = HttpConnection(url)
        try:
            for customer in customers:
                found = await call(connection, self.name, "orders_of", {"customer": customer})
                self.found[customer] = [sale["id"] for sale in found]
        finally:
            connection.close()

    def faults(self, replay: TraceReplay) -> list[str]:
        """Return which guarantees the log, the events and the services' book contradict."""
        sales = dict(replay.objects_of_kind("order"))
        return [
            *_faults_of_ends(self.placed, self.acknowledged, sales, replay),
            *_faults_of_stock(sales, replay),
            *_faults_of_services(self.placed, sales, self.services.book),
            *_faults_of_mails(self.placed, sales, self.events, self.services.book),
            *_faults_of_lookups(self.found, sales),
            *([f"{self.mails['given_up']} mails were given up."] if self.mails["given_up"] else []),
        ]

    def verdict(self, replay: TraceReplay) -> str:
        """See `Application`."""
        sales = dict(replay.objects_of_kind("order"))
        ends = Counter(sales[order]["status"] for order in self.placed)
        book = self.services.book
        taken = sum(book.taken(order) for order in self.placed)
        return (
            f"of {len(self.placed):,} orders of this run "
            f"{', '.join(f'{ends[end]:,} were {end}' for end in _ENDS)}. "
            f"The payment service holds {taken / 100:,.2f}, which is the total of the paid ones, "
            f"although {book.failed:,} requests failed and {book.repeated:,} were repeated. "
            f"The stock equals what the paid orders took. {sum(book.mails.values()):,} mails were "
            "sent, none twice."
        )


async def _events(url: str) -> AsyncIterator[tuple[str, str]]:
    """Yield order and status of each event in the log of events.

    Raises:
        LoadError: the gateway does not answer.
    """
    try:
        async with httpx.AsyncClient(**reach(url).for_httpx, timeout=60.0) as client:
            tail = (
                (await client.get(f"/logs/{_EVENTS_PATH}/tail")).raise_for_status().json()["tail"]
            )
            bound = 0
            while bound < tail:
                answer = await client.get(
                    f"/logs/{_EVENTS_PATH}/records", params={"bound": bound, "limit": _PAGE}
                )
                page = answer.raise_for_status().json()
                for record in page["records"]:
                    event = json.loads(record["data"])
                    yield event["order"], event["status"]
                bound = page["next_bound"] if page["records"] else tail
    except httpx.HTTPError as error:
        raise LoadError(f"The events cannot be read over HTTP: {error}.") from error


def _faults_of_ends(
    placed: Iterable[str], told: dict[str, str], sales: dict[str, Any], replay: TraceReplay
) -> Iterator[str]:
    """Check that each order ended once, as its client read it."""
    for order in placed:
        status = sales.get(order, {}).get("status")
        if status not in _ENDS:
            yield f"Order {order} has not ended: its status is {status}."
        elif told.get(order, status) != status:
            yield f"Order {order} ended as {status}, but its client read {told[order]}."
    for order in sales:
        statuses = replay.statuses.get(f"order:{order}", [])
        if any(status in _ENDS for status in statuses[:-1]):
            yield f"Order {order} went on after its end: {', '.join(statuses)}."


def _faults_of_stock(sales: dict[str, Any], replay: TraceReplay) -> Iterator[str]:
    """Compare the stock with what orders hold, and each end of an order with what it holds."""
    held: Counter[str] = Counter()
    for order, sale in sales.items():
        if sale["holds"]:
            held.update(sale["lines"])
        if sale["status"] in _ENDS and sale["holds"] is not (sale["status"] == "paid"):
            yield f"Order {order} is {sale['status']}, and holds is {sale['holds']}."
    for item, stock in replay.objects_of_kind("stock"):
        if (least := replay.least["stock:" + item, "left"]) < 0:
            yield f"stock:{item} had {least} left."
        if stock["pieces"] - stock["left"] != held[item]:
            yield (
                f"stock:{item} had {stock['pieces']} and has {stock['left']} left, but orders hold "
                f"{held[item]}."
            )


def _faults_of_services(placed: Iterable[str], sales: dict[str, Any], book: Book) -> Iterator[str]:
    """Compare the book of the services with the orders of this run: money and parcels."""
    for order in placed:
        sale = sales.get(order, {})
        is_paid = sale.get("status") == "paid"
        wanted = (sale["total"], 1) if is_paid else (0, 0)
        there = (book.taken(order), book.shipped[order])
        if there != wanted:
            yield f"Order {order} has {there} cents and parcels outside, but should have {wanted}."
        if len(book.charged.get(order, ())) > 1:
            yield f"Order {order} was charged {len(book.charged[order])} times."
    for order in book.charged.keys() - set(placed):
        yield f"The payment service charged order {order}, which no client placed."


def _faults_of_mails(
    placed: Iterable[str],
    sales: dict[str, Any],
    events: Counter[tuple[str, str]],
    book: Book,
) -> Iterator[str]:
    """Check that each end of an order was published and mailed once, and nothing else twice."""
    for order in placed:
        status = sales.get(order, {}).get("status", "")
        published = {end: events[order, end] for end in _ENDS if events[order, end]}
        if published != {status: 1}:
            yield f"Order {order} is {status}, but its published ends are {published}."
        if not book.mails[order, status]:
            yield f"The mail that order {order} is {status} was not sent."
    for (order, status), count in events.items():
        if count != 1:
            yield f"The event that order {order} is {status} is in the log {count} times."
    for (order, status), count in book.mails.items():
        if count != 1:
            yield f"The mail that order {order} is {status} was sent {count} times."
        if status in _ENDS and status != sales.get(order, {}).get("status"):
            yield f"A mail says that order {order} is {status}, which it is not."


def _faults_of_lookups(found: dict[str, list[str]], sales: dict[str, Any]) -> Iterator[str]:
    """Compare the lookups by customer with the orders."""
    expected: dict[str, list[str]] = {customer: [] for customer in found}
    for order, sale in sales.items():
        if sale["customer"] in expected:
            expected[sale["customer"]].append(order)
    for customer, orders in found.items():
        if orders != sorted(expected[customer]):
            yield f"{customer} has the orders {sorted(expected[customer])}, but {orders} are shown."


class Customer:
    """One client. It places an order, decides or cancels the order, waits for its end, and looks up
    the order. A failed request is repeated.
    """

    def __init__(self, orders: Orders, name: str, seed: int) -> None:
        self._orders = orders
        self._name = name
        self._choose = random.Random(seed)  # noqa: S311 - no secret
        self._requests = 0
        self._plan: list[LoadRequest] = []

    def request(self) -> LoadRequest:
        """Return the next request about the current order, or place a new one."""
        if not self._plan:
            self._plan = self._planned()
        return self._plan[0]

    def _planned(self) -> list[LoadRequest]:
        choose, self._requests = self._choose, self._requests + 1
        order: dict[str, Any] = {
            "id": f"{self._name}.{self._requests}",
            "customer": choose.choice(self._orders.customers),
            "lines": {
                item: choose.randint(1, 2)
                for item in choose.sample(list(self._orders.goods), choose.randint(1, 3))
            },
            "card": choose.choices(("card", DECLINED_CARD), (9, 1))[0],
            "city": choose.choices(("Bonn", UNREACHED_CITY), (9, 1))[0],
        }
        about = {"order": order["id"]}
        place = LoadRequest("place", {"order": order})
        plan = [place] * choose.choice((1, 1, 1, 2))  # an impatient customer places it again
        total = sum(self._orders.goods[item] * n for item, n in order["lines"].items())
        if total > _APPROVAL_ABOVE_CENTS and choose.random() < 0.8:
            plan.append(LoadRequest("decide", about | {"approve": choose.random() < 0.75}))
        if choose.random() < 0.1:
            plan.append(LoadRequest("cancel", about))
        plan.append(LoadRequest("outcome", about))
        if choose.random() < 0.3:
            plan.append(LoadRequest("orders_of", {"customer": order["customer"]}))
        self._orders.placed[order["id"]] = order["customer"]
        return plan

    def answered(self, request: LoadRequest, result: bytes) -> None:
        """Remember the end of an order, and continue with the plan."""
        answer = json.loads(result)
        if request.function == "outcome" and answer["status"] not in _ENDS:
            return  # ask again
        self._plan.pop(0)
        self._orders.unknown.pop(_order_of(request), None)
        if request.function == "outcome":
            self._orders.acknowledged[answer["id"]] = answer["status"]

    def failed(self, request: LoadRequest) -> None:
        """Keep the request in the plan, because every request may be repeated."""
        self._orders.unknown[_order_of(request)] = request


def _order_of(request: LoadRequest) -> str:
    match request.function:
        case "place":
            return str(request.arguments["order"]["id"])
        case "orders_of":
            return ""
        case _:
            return str(request.arguments["order"])
