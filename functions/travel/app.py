"""Functions that search and recommend hotels, check users, and reserve a room and a seat.

`reserve` starts a workflow, a saga, because a hotel and an airline are two companies, which share
no transaction. The workflow takes a room, then a seat. If the flight is full, the workflow gives
the room back. Otherwise it starts the order, a child workflow that runs in the background. The log
decides each operation once. So a reservation takes one room and one seat and leads to one order,
even if workers crash meanwhile.

The state consists of BokiStore objects in the log `travel`. `map` has places, prices and ratings of
hotels; `rooms:{hotel}` and `seats:{flight}` have `capacity` and `left`. The other objects are
`hotel:{id}`, `user:{name}`, `reservation:{id}`, `order:{id}` and `orders:{user}`. The runs of
workflows are in the log `travel/flow`.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from bokiflow import Cancelled, Flow, RunCancelledError, Workflow
from bokistore import Store, Transaction
from indilog import App, Context

from .places import Place, distance_km, nearest

app = App("travel")
flow = Flow(app)

LOG: Final = "travel"
LOADED_MAX: Final = 30
"""Hotels, flights and users loaded by one record: a hotel has two objects, and a record has at most
64 tags.
"""
ORDERS_LISTED_MAX: Final = 100
OBJECTS_SHOWN_MAX: Final = 1000
SECRET: Final = frozenset({"password", "salt"})
"""Fields that no function answers."""
_NAME_LENGTH_MAX: Final = 128


@dataclass(frozen=True)
class Hotel:
    """A hotel, as loaded and as returned to clients.

    Attributes:
        rating: 0 to 5.
        price: price per night.
        rooms: number of rooms before the first reservation.
        listed: whether it is on the map.
    """

    id: str
    name: str
    lat: float
    lon: float
    rating: float
    price: float
    rooms: int
    phone: str = ""
    address: str = ""
    listed: bool = True


@dataclass(frozen=True)
class Order:
    """A request for a room and a seat; `id` is the id of the request."""

    id: str
    user: str
    hotel: str
    flight: str


@dataclass(frozen=True)
class Receipt:
    """The outcome of a request for a room and a seat."""

    id: str
    reserved: bool
    """Whether the room and the seat are reserved; False if the hotel or the flight is full."""
    run: str | None = None
    """Id of the run that places the order."""


@app.function
async def search(ctx: Context, lat: float, lon: float) -> list[Hotel]:
    """Return the nearest hotels around a place, cheapest first."""
    near = await ctx.call(geo, lat=lat, lon=lon)
    return await ctx.call(rate, hotels=near)


@app.function
async def geo(ctx: Context, lat: float, lon: float) -> list[str]:
    """Return the ids of at most 5 hotels within 10 km, nearest first."""
    return nearest(_places(await _listed(ctx)), (lat, lon))


@app.function
async def rate(ctx: Context, hotels: list[str]) -> list[Hotel]:
    """Return these hotels, cheapest first."""
    store = _store(ctx)
    found = await asyncio.gather(*[store.get(f"hotel:{hotel}", Hotel) for hotel in hotels])
    return sorted(filter(None, found), key=lambda hotel: (hotel.price, hotel.id))


@app.function
async def recommend(
    ctx: Context, by: Literal["distance", "rate", "price"], lat: float = 0.0, lon: float = 0.0
) -> list[Hotel]:
    """Return the hotels that are nearest to a place, have the best rating, or are the cheapest."""
    listed = await _listed(ctx)
    if by == "distance":
        places = _places(listed)
        worth = {hotel: -distance_km(places[hotel], (lat, lon)) for hotel in listed}
    else:
        worth = {
            hotel: known["rating"] if by == "rate" else -known["price"]
            for hotel, known in listed.items()
        }
    best = max(worth.values(), default=0.0)
    return await ctx.call(rate, hotels=[hotel for hotel, is_ in worth.items() if is_ == best])


@app.function
async def check_user(ctx: Context, user: str, password: str) -> bool:
    """Return whether the password is the user's."""
    known = await _store(ctx).get(f"user:{user}")
    return bool(known) and known["password"] == _hashed(password, known["salt"])


@app.function
async def reserve(
    ctx: Context, user: str, password: str, hotel: str, flight: str, request: str | None = None
) -> Receipt:
    """Reserve both a room and a seat, or neither.

    To repeat a request whose outcome is unknown, pass the same `request`: there will be one
    reservation. Without `request`, each call is a new request.
    """
    store = _store(ctx)
    is_user, rooms, seats = await asyncio.gather(
        ctx.call(check_user, user=user, password=password),
        store.get(f"rooms:{hotel}"),
        store.get(f"seats:{flight}"),
    )
    if not is_user:
        raise PermissionError("The user or the password is wrong.")
    if not (rooms and seats):
        raise LookupError(f"There is no {'flight' if rooms else 'hotel'} of that name.")
    request = ctx.invocation_id if request is None else _checked("request", request)
    handle = await reserving.start(Order(request, user, hotel, flight), id=f"reserve:{request}")
    try:
        return await handle.result()
    except RunCancelledError:
        return Receipt(request, reserved=False)


@app.function
async def order_of(ctx: Context, request: str, wait_s: float = 30.0) -> Order | None:
    """Wait for the order of a reservation, and return it; None if nothing was reserved."""
    store = _store(ctx)
    if not await store.get(f"reservation:{request}"):
        return None
    placed = await store.get(f"order:{request}", Order)
    if placed is None:
        receipt = await reserving.handle(f"reserve:{request}").result(wait_s)
        assert receipt.run is not None, "only a reservation has a run"
        await ordering.handle(receipt.run).result(wait_s)
        placed = await store.get(f"order:{request}", Order)
    return placed


@app.function
async def load(ctx: Context, hotels: list[Hotel], flights: dict[str, int], users: list[str]) -> int:
    """Add hotels, flights (seats by name) and users; return how many are new.

    One record adds all of them. Existing hotels and flights keep their capacity. The password of a
    loaded user is the user's name.
    """
    if len(hotels) + len(flights) + len(users) > LOADED_MAX:
        raise ValueError(f"Load at most {LOADED_MAX} hotels, flights and users per call.")
    new = {f"rooms:{_checked('id', hotel.id)}": _all_left(hotel.rooms) for hotel in hotels}
    new |= {f"seats:{_checked('flight', name)}": _all_left(n) for name, n in flights.items()}
    new |= {f"user:{_checked('user', name)}": _account(name) for name in users}

    async def body(txn: Transaction) -> int:
        for hotel in hotels:
            txn.set(f"hotel:{hotel.id}", "", asdict(hotel))
        if listed := {hotel.id: _on_the_map(hotel) for hotel in hotels if hotel.listed}:
            txn.merge("map", "hotels", listed)
        found = await asyncio.gather(*[txn.get(name) for name in new])
        missing = [obj for obj in found if not obj]
        for obj in missing:
            obj.set("", new[obj.name])
        return len(missing)

    return await _store(ctx).transact(body)


@app.function
async def objects(ctx: Context, names: list[str]) -> list[dict[str, Any] | None]:
    """Return the values of objects in the store without passwords' hashes and salts; None for
    objects that do not exist.
    """
    if len(names) > OBJECTS_SHOWN_MAX:
        raise ValueError(f"Ask for at most {OBJECTS_SHOWN_MAX} objects, not {len(names)}.")
    store = _store(ctx)
    found = await asyncio.gather(*[store.get(name) for name in names])
    return [
        {key: value for key, value in obj.value.items() if key not in SECRET} if obj else None
        for obj in found
    ]


# --- workflows


@flow.workflow
async def reserving(wf: Workflow, order: Order) -> Receipt:
    """Take a room and a seat, then start the order without waiting for it.

    If there is no seat, the run ends as cancelled: its compensation has given the room back.
    """
    store = Store(wf.log(LOG))

    async def room(txn: Transaction) -> bool:
        return await take_room(txn, order)

    async def seat(txn: Transaction) -> bool:
        return await take_seat(txn, order)

    async def give_room_back() -> None:
        async def body(txn: Transaction) -> None:
            txn.increment(f"rooms:{order.hotel}", "left")

        await store.transact(body, id=wf.key)  # a compensation may run twice; the id counts once

    if not await wf.transact(store, room):
        return Receipt(order.id, reserved=False)
    wf.compensate(give_room_back)
    if not await wf.transact(store, seat):
        raise Cancelled("The flight is full.")
    child = await wf.start_child(ordering, order)
    return Receipt(order.id, reserved=True, run=child.id)


@flow.workflow
async def ordering(wf: Workflow, order: Order) -> None:
    """Place the order of a reservation."""

    async def place_it(txn: Transaction) -> None:
        place(txn, order)

    await wf.transact(Store(wf.log(LOG)), place_it)


async def take_room(txn: Transaction, order: Order) -> bool:
    """Take a room if one is left; return whether it was taken."""
    rooms = await txn.get(f"rooms:{order.hotel}")
    if rooms["left"] < 1:
        return False
    rooms.increment("left", -1)
    return True


async def take_seat(txn: Transaction, order: Order) -> bool:
    """Take a seat if one is left, and store the reservation; return whether it was taken."""
    seats = await txn.get(f"seats:{order.flight}")
    if seats["left"] < 1:
        return False
    seats.increment("left", -1)
    txn.set(f"reservation:{order.id}", "", asdict(order))
    return True


def place(txn: Transaction, order: Order) -> None:
    """Store the order under its own id and with its user."""
    txn.set(f"order:{order.id}", "", asdict(order))
    txn.push(f"orders:{order.user}", "orders", order.id, limit=ORDERS_LISTED_MAX)
    txn.increment(f"orders:{order.user}", "count")


def _store(ctx: Context) -> Store:
    return Store(ctx.log(LOG))


async def _listed(ctx: Context) -> Mapping[str, Mapping[str, float]]:
    listed: Mapping[str, Mapping[str, float]] = (await _store(ctx).get("map")).get("hotels", {})
    return listed


def _places(listed: Mapping[str, Mapping[str, float]]) -> dict[str, Place]:
    return {hotel: (known["lat"], known["lon"]) for hotel, known in listed.items()}


def _on_the_map(hotel: Hotel) -> dict[str, float]:
    return {"lat": hotel.lat, "lon": hotel.lon, "rating": hotel.rating, "price": hotel.price}


def _all_left(capacity: int) -> dict[str, Any]:
    if capacity < 0:
        raise ValueError(f"A capacity must not be negative, but {capacity} is.")
    return {"capacity": capacity, "left": capacity}


def _account(user: str) -> dict[str, Any]:
    salt = secrets.token_hex(8)
    return {"user": user, "salt": salt, "password": _hashed(user, salt)}


def _hashed(password: str, salt: str) -> str:
    """Hash a password with a fast, weak hash, because this application measures the platform and
    protects no secrets.
    """
    return hashlib.blake2b(password.encode(), salt=salt.encode(), digest_size=16).hexdigest()


def _checked(what: str, text: str) -> str:
    if not text or len(text) > _NAME_LENGTH_MAX or not text.isprintable():
        raise ValueError(f"A {what} must be 1 to {_NAME_LENGTH_MAX} characters, not {text!r:.80}.")
    return text
