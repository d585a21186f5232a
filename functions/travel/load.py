"""The load of the travel application: data, clients and check (WORKLOADS 4). The demo and
`bench.travel` run it by `workload.demonstration`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from functions.travel.app import LOADED_MAX, ORDERS_LISTED_MAX
from functions.travel.hotels import LISTED, Known
from functions.workload.http_connection import HttpConnection
from functions.workload.load import LoadRequest, Visitor, call, load_batches
from functions.workload.replay import TraceReplay

MIX: Final = {"search": 60.0, "recommend": 39.0, "check_user": 0.5, "reserve": 0.5}
"""Percent of the requests (Boki's benchmark)."""
FLIGHTS: Final = 100
USERS: Final = 500
CAPACITY: Final = 1000
_CHECKERS: Final = 8


class Travel:
    """The application `travel` with some hotels; see `workload.demonstration`.

    Attributes:
        acknowledged: for each request, whether its answer said that it made a reservation.
        unknown: reservations that failed and may have taken effect; `settle` repeats them.
    """

    name = "travel"
    loads = "hotels"

    def __init__(
        self,
        hotels: Sequence[Known],
        *,
        flights: int = FLIGHTS,
        users: int = USERS,
        capacity: int = CAPACITY,
        mix: dict[str, float] = MIX,
    ) -> None:
        self.hotels = hotels
        self.flights = [f"flight {number}" for number in range(flights)]
        self.users = [f"user {number}" for number in range(users)]
        self.capacity = capacity
        self.mix = mix
        self.functions = tuple(mix)
        self.acknowledged: dict[str, bool] = {}
        self.unknown: dict[str, LoadRequest] = {}

    def batches(self) -> int:
        """See `Application`."""
        return len(self._batches())

    def _batches(self) -> list[dict[str, Any]]:
        hotels = [
            msgspec.to_builtins(hotel) | {"rooms": self.capacity, "listed": number < LISTED}
            for number, hotel in enumerate(self.hotels)
        ]
        flights = [(flight, self.capacity) for flight in self.flights]
        return [
            *[{"hotels": part, "flights": {}, "users": []} for part in _parts(hotels)],
            *[{"hotels": [], "flights": dict(part), "users": []} for part in _parts(flights)],
            *[{"hotels": [], "flights": {}, "users": part} for part in _parts(self.users)],
        ]

    async def load(self, url: str, progress: Callable[[int], None]) -> str:
        """Load hotels, flights and users; existing hotels and flights keep their capacity."""
        new = sum(await load_batches(url, self.name, self._batches(), progress))
        return f"{len(self.hotels)} hotels, {len(self.flights)} flights, users ({new:,} new)"

    def visitors(self, count: int, seed: int) -> list[Visitor]:
        """See `Application`."""
        now = time.time_ns()
        return [Traveller(self, f"{seed}.{now}.{number}", seed + number) for number in range(count)]

    async def settle(self, url: str) -> None:
        """Repeat failed reservations until their outcomes are known. Return when all orders are
        placed.
        """
        for request in list(self.unknown.values()):
            connection = HttpConnection(url)
            receipt = await call(connection, self.name, request.function, request.arguments)
            connection.close()
            self.keep(request, reserved=receipt["reserved"])
        requests = iter([request for request, reserved in self.acknowledged.items() if reserved])
        await asyncio.gather(*[self._orders_placed(url, requests) for _ in range(_CHECKERS)])

    async def _orders_placed(self, url: str, requests: Iterable[str]) -> None:
        connection = HttpConnection(url)
        try:
            for request in requests:
                await call(connection, self.name, "order_of", {"request": request})
        finally:
            connection.close()

    def keep(self, request: LoadRequest, *, reserved: bool) -> None:
        """Remember an acknowledged answer."""
        self.acknowledged[request.arguments["request"]] = reserved
        self.unknown.pop(request.arguments["request"], None)

    def faults(self, replay: TraceReplay) -> list[str]:
        """Return which reservations contradict the capacities, orders or acknowledgements."""
        reservations = dict(replay.objects_of_kind("reservation"))
        faults = [
            f"Request {request} was answered {'yes' if reserved else 'no'}, "
            "but the log says otherwise."
            for request, reserved in self.acknowledged.items()
            if reserved is not (request in reservations)
        ]
        for kind, field in (("rooms", "hotel"), ("seats", "flight")):
            used = Counter(reservation[field] for reservation in reservations.values())
            faults += _faults_of_capacities(kind, replay, used)
        return [*faults, *_faults_of_orders(reservations, replay)]

    def verdict(self, replay: TraceReplay) -> str:
        """See `Application`."""
        reservations = sum(1 for _ in replay.objects_of_kind("reservation"))
        mine = sum(self.acknowledged.values())
        return (
            f"of {reservations:,} reservations {mine:,} were acknowledged in this run; they equal "
            "the "
            "used capacity, no capacity was ever below zero, and each has one order."
        )


def _parts(items: Sequence[Any]) -> list[Any]:
    return [items[n : n + LOADED_MAX] for n in range(0, len(items), LOADED_MAX)]


def _faults_of_capacities(kind: str, replay: TraceReplay, used: Counter[str]) -> Iterable[str]:
    """Compare the remaining capacities with the reservations, and find capacities that were below
    zero at any place of the log.
    """
    capacities = dict(replay.objects_of_kind(kind))
    for name in capacities.keys() | used.keys():
        known = capacities.get(name, {"capacity": 0, "left": 0})
        if (least := replay.least.get((f"{kind}:{name}", "left"), 0)) < 0:
            yield f"{kind}:{name} had {least} left."
        if known["capacity"] - known["left"] != used[name]:
            yield (
                f"{kind}:{name} had {known['capacity']} and has {known['left']} left, but "
                f"{used[name]} are reserved."
            )


def _faults_of_orders(reservations: dict[str, Any], replay: TraceReplay) -> Iterable[str]:
    """Compare reservations with orders, and orders with the users' lists, in the log's order."""
    orders = dict(replay.objects_of_kind("order"))
    for request in reservations.keys() - orders.keys():
        yield f"Reservation {request} has no order."
    for request in orders.keys() - reservations.keys():
        yield f"Order {request} has no reservation."
    placed: dict[str, list[str]] = {}
    for request, order in orders.items():
        placed.setdefault(order["user"], []).append(request)
        if order != reservations.get(request, order):
            yield f"Order {request} differs from its reservation."
    listed = dict(replay.objects_of_kind("orders"))
    for user in placed.keys() | listed.keys():
        ids = placed.get(user, [])
        wanted = {"orders": ids[-ORDERS_LISTED_MAX:], "count": len(ids)}
        if listed.get(user) != wanted:
            yield f"orders:{user} is {listed.get(user)}, but there are {wanted}."


class Traveller:
    """One client. Each request has another user and stay; failed reservations are repeated."""

    def __init__(self, travel: Travel, name: str, seed: int) -> None:
        self._travel = travel
        self._name = name
        self._choose = random.Random(seed)  # noqa: S311 - no secret
        self._functions, self._weights = list(travel.mix), list(travel.mix.values())
        self._requests = 0
        self._again: LoadRequest | None = None

    def request(self) -> LoadRequest:
        """Search, ask for a recommendation, check a user or reserve."""
        if self._again is not None:
            return self._again
        (function,) = self._choose.choices(self._functions, self._weights)
        return LoadRequest(function, self._arguments(function))

    def _arguments(self, function: str) -> dict[str, Any]:
        choose = self._choose
        user = choose.choice(self._travel.users)
        match function:
            case "search":
                return self._place()
            case "recommend":
                return {"by": choose.choice(("distance", "rate", "price")), **self._place()}
            case "check_user":
                return {"user": user, "password": user}
            case _:
                self._requests += 1
                return {
                    "user": user,
                    "password": user,
                    "hotel": choose.choice(self._travel.hotels).id,
                    "flight": choose.choice(self._travel.flights),
                    "request": f"{self._name}.{self._requests}",
                }

    def _place(self) -> dict[str, float]:
        near = self._choose.choice(self._travel.hotels)
        return {
            "lat": near.lat + self._choose.uniform(-0.02, 0.02),
            "lon": near.lon + self._choose.uniform(-0.02, 0.02),
        }

    def answered(self, request: LoadRequest, result: bytes) -> None:
        """Remember a reservation that was acknowledged."""
        self._again = None
        if request.function == "reserve":
            self._travel.keep(request, reserved=json.loads(result)["reserved"])

    def failed(self, request: LoadRequest) -> None:
        """Remember a reservation that may exist, and repeat the request."""
        if request.function == "reserve":
            self._again = request
            self._travel.unknown[request.arguments["request"]] = request
