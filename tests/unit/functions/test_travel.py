"""The travel functions and workflows over a log in memory, their check, and their demo."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Coroutine
from typing import Any, Literal

import msgspec
import pytest
from rich.console import Console

from bokistore import Obj, Store, Transaction
from functions.travel import app as travel
from functions.travel.app import Hotel, Order, Receipt
from functions.travel.hotels import generated_hotels
from functions.travel.load import Travel
from functions.workload.demonstration import demonstrate, show
from functions.workload.replay import TraceReplay
from indilog.base.errors import AppendOutcomeUnknownError, InvalidArgumentsError
from indilog.testing import MemoryLogs
from indilog.testing.stepper import Choose, SteppedLog, interleavings, run_stepped
from tests.unit.functions.stand_in import Functions, serving

HERE = {"lat": 37.78, "lon": -122.41}
WISH: dict[str, Any] = {"user": "ann", "password": "ann", "hotel": "h0", "flight": "f0"}


def hotel(number: int, *, price: float, rooms: int = 2, listed: bool = True) -> Hotel:
    """Return a hotel; each number is about a kilometre further north."""
    return Hotel(
        f"h{number}", "Inn", HERE["lat"] + number / 100, HERE["lon"], number, price, rooms,
        listed=listed,
    )  # fmt: skip


async def a_town() -> Functions:
    functions = Functions(travel.app)
    hotels = [hotel(n, price=100 - n) for n in range(12)]
    flights = {"f0": 2, "f1": 1}
    assert await travel.load(functions.context(), hotels, flights, ["ann", "bob"]) == 16
    return functions


def objects_of(functions: Functions) -> Store:
    return Store(functions.logs.log("travel"))


async def left(functions: Functions, *names: str) -> list[Any]:
    found = await objects_of(functions).multi_get(names)
    return [found[name]["left"] for name in names]


@pytest.mark.asyncio
async def test_a_search_finds_the_nearest_hotels_cheapest_first() -> None:
    functions = await a_town()
    found = await travel.search(functions.context(), **HERE)
    assert [one.id for one in found] == ["h4", "h3", "h2", "h1", "h0"]
    assert functions.calls == ["geo", "rate"]
    assert await travel.search(functions.context(), 0.0, 0.0) == []


@pytest.mark.asyncio
async def test_a_search_outside_the_map_finds_no_hotel() -> None:
    functions = Functions(travel.app)
    assert await travel.recommend(functions.context(), "price") == []
    await travel.load(functions.context(), [hotel(0, price=1, listed=False)], {}, [])
    assert await travel.search(functions.context(), **HERE) == []
    assert (await travel.rate(functions.context(), ["h0", "none"]))[0].id == "h0"


@pytest.mark.asyncio
@pytest.mark.parametrize(("by", "best"), [("distance", "h3"), ("rate", "h11"), ("price", "h11")])
async def test_the_best_are_recommended(
    by: Literal["distance", "rate", "price"], best: str
) -> None:
    functions = await a_town()
    near_h3 = {"lat": HERE["lat"] + 0.031, "lon": HERE["lon"]}
    assert [one.id for one in await travel.recommend(functions.context(), by, **near_h3)] == [best]


@pytest.mark.asyncio
async def test_a_user_is_identified_by_the_password() -> None:
    functions = await a_town()
    known = [("ann", "ann"), ("ann", "bob"), ("zoe", "zoe")]
    results = [await travel.check_user(functions.context(), *one) for one in known]
    assert results == [True, False, False]


@pytest.mark.asyncio
async def test_a_reservation_takes_a_room_and_a_seat_and_creates_an_order() -> None:
    functions = await a_town()
    receipt = await travel.reserve(functions.context(), **WISH, request="q")
    assert (receipt.id, receipt.reserved) == ("q", True)
    assert await left(functions, "rooms:h0", "seats:f0") == [1, 1]
    placed = await travel.order_of(functions.context(), "q")
    assert placed == Order("q", "ann", "h0", "f0")
    assert (await objects_of(functions).get("orders:ann")).value == {"orders": ["q"], "count": 1}


@pytest.mark.asyncio
async def test_a_repeated_request_reserves_and_orders_once() -> None:
    functions = await a_town()
    asked = [travel.reserve(functions.context(), **WISH, request="q") for _ in range(5)]
    receipts = await asyncio.gather(*asked)
    assert receipts == [Receipt("q", reserved=True, run=receipts[0].run)] * 5
    await travel.order_of(functions.context(), "q")
    assert await left(functions, "rooms:h0", "seats:f0") == [1, 1]
    assert (await objects_of(functions).get("orders:ann"))["count"] == 1


@pytest.mark.asyncio
async def test_sold_out_places_are_refused_and_both_are_reserved_or_none() -> None:
    functions = await a_town()
    asked = [
        travel.reserve(functions.context(), **WISH | {"flight": "f1"}, request=str(n))
        for n in range(6)
    ]
    receipts = await asyncio.gather(*asked)
    assert sum(receipt.reserved for receipt in receipts) == 1
    assert await left(functions, "rooms:h0", "seats:f1") == [1, 0]
    refused = next(receipt.id for receipt in receipts if not receipt.reserved)
    assert await travel.order_of(functions.context(), refused) is None


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"password": "x"}, "The user or the password is wrong"),
        ({"hotel": "h99"}, "There is no hotel of that name"),
        ({"flight": "f99"}, "There is no flight of that name"),
        ({"request": ""}, "1 to 128 characters"),
    ],
)
async def test_an_invalid_request_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    functions = await a_town()
    with pytest.raises((ValueError, LookupError, PermissionError), match=sentence):
        await travel.reserve(functions.context(), **{**WISH, "request": "q", **wrong})
    assert await left(functions, "rooms:h0", "seats:f0") == [2, 2]


@pytest.mark.asyncio
async def test_reloading_keeps_the_remaining_capacity() -> None:
    functions = await a_town()
    await travel.reserve(functions.context(), **WISH)
    new = await travel.load(functions.context(), [hotel(0, price=7, rooms=9)], {"f0": 9}, ["cid"])
    assert new == 1
    assert await left(functions, "rooms:h0", "seats:f0") == [1, 1]
    assert (await travel.rate(functions.context(), ["h0"]))[0].price == 7
    with pytest.raises(ValueError, match="at most 30"):
        await travel.load(functions.context(), [], {}, [str(n) for n in range(31)])
    with pytest.raises(ValueError, match="not be negative"):
        await travel.load(functions.context(), [], {"f9": -1}, [])


@pytest.mark.asyncio
async def test_an_unknown_recommendation_criterion_is_refused_with_the_known_ones() -> None:
    functions = await a_town()
    with pytest.raises(InvalidArgumentsError, match="by"):
        await functions.call("travel.recommend", b'{"by":"luck"}', functions.context().session)


def taken_by_two(
    choose: Choose, ids: tuple[str, str], part: Callable[..., Coroutine[Any, Any, bool]]
) -> tuple[list[bool], dict[str, Obj]]:
    """Run two executions that take the last room or seat, each under an id."""
    logs = MemoryLogs()
    log = logs.log("travel")
    setup = Store(log)

    async def prepared() -> None:
        for name in ("rooms:h0", "seats:f0"):
            await setup.set(name, "", {"capacity": 1, "left": 1})

    run_stepped([prepared()], lambda ready: ready[0])

    def taken(id_: str) -> Coroutine[Any, Any, bool]:
        async def take(txn: Transaction) -> bool:
            return await part(txn, Order(id_, "ann", "h0", "f0"))

        return Store(SteppedLog(log)).transact(take, id=f"key-{id_}")

    results = run_stepped([taken(one) for one in ids], choose)
    names = ["rooms:h0", "seats:f0", "reservation:a", "reservation:b"]
    (found,) = run_stepped([Store(log).multi_get(names)], lambda ready: ready[0])
    return results, found


@pytest.mark.parametrize("ids", [("a", "a"), ("a", "b")])
def test_the_last_room_and_the_last_seat_are_taken_once_in_every_interleaving(
    ids: tuple[str, str],
) -> None:
    for part, taken in ((travel.take_room, "rooms:h0"), (travel.take_seat, "seats:f0")):
        tried = 0
        for results, found in interleavings(
            lambda choose, part=part: taken_by_two(choose, ids, part)  # type: ignore[misc]
        ):
            tried += 1
            assert found[taken]["left"] == 0
            reserved = found["reservation:a"].exists + found["reservation:b"].exists
            assert reserved == (part is travel.take_seat)
            assert sorted(results) == ([True, True] if ids[0] == ids[1] else [False, True])
        assert tried > 5


@pytest.mark.asyncio
async def test_a_room_without_a_seat_is_returned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    functions, real = await a_town(), Store.transact
    lost: list[str | None] = []

    async def transact(self: Store, body: Any, **given: Any) -> Any:  # noqa: ANN401
        result = await real(self, body, **given)
        if body.__qualname__.startswith("reserving.<locals>.give_room_back") and not lost:
            lost.append(given.get("id"))
            raise AppendOutcomeUnknownError("The answer was lost.")
        return result

    monkeypatch.setattr(Store, "transact", transact)
    wish = WISH | {"flight": "f1"}
    assert (await travel.reserve(functions.context(), **wish, request="first")).reserved
    for _ in range(3):
        refused = await travel.reserve(functions.context(), **wish, request="second")
        assert refused == Receipt("second", reserved=False)
        assert await left(functions, "rooms:h0", "seats:f1") == [1, 0]
    undone = await travel.reserving.handle("reserve:second").status()
    assert (undone.state, undone.problem) == ("cancelled", "Cancelled: The flight is full.")
    assert len(lost) == 1, "the compensation ran twice"


@pytest.mark.asyncio
async def test_a_full_hotel_needs_no_compensation() -> None:
    functions = await a_town()
    for request in "abc":
        await travel.reserve(functions.context(), **WISH, request=request)
    assert await left(functions, "rooms:h0", "seats:f0") == [0, 0]
    assert (await travel.reserving.handle("reserve:c").status()).state == "done"


@pytest.mark.asyncio
async def test_no_function_answers_a_password_its_hash_or_its_salt() -> None:
    functions = await a_town()
    [shown] = await travel.objects(functions.context(), ["user:ann"])
    assert shown == {"user": "ann"}


@pytest.mark.asyncio
async def test_the_demo_retries_failed_requests_and_finds_each_reservation_once() -> None:
    async with serving(travel.app) as gateway:
        lost = iter(range(12))

        def tamper(function: str, result: bytes) -> bytes | tuple[int, bytes]:
            if function == "reserve" and next(lost, 1) % 3 == 0:
                return 500, b'{"detail":"The worker died.","retryable":false}'
            return result

        gateway.tamper = tamper
        mix = {"search": 1.0, "reserve": 9.0}
        application = Travel(generated_hotels(count=5), flights=2, users=3, capacity=4, mix=mix)
        console = Console(file=io.StringIO(), width=160)
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
        assert outcome.faults == []
        assert outcome.run.tallies["reserve"].failures["The worker died."] > 0
        assert application.acknowledged
        assert isinstance(console.file, io.StringIO)
        assert "each has one order" in " ".join(console.file.getvalue().split())


def replay() -> TraceReplay:
    reservation = {"id": "q", "user": "ann", "hotel": "h0", "flight": "f0"}
    return TraceReplay(
        objects={
            "rooms:h0": {"capacity": 2, "left": 1},
            "seats:f0": {"capacity": 2, "left": 1},
            "reservation:q": reservation,
            "order:q": dict(reservation),
            "orders:ann": {"orders": ["q"], "count": 1},
        }
    )


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        ({}, None),
        ({"rooms:h0": {"capacity": 2, "left": 0}}, "rooms:h0 had 2 and has 0 left, but 1 are"),
        ({"seats:f0": {"capacity": 2, "left": 2}}, "seats:f0 had 2 and has 2 left, but 1 are"),
        ({"order:q": None}, "Reservation q has no order."),
        ({"reservation:q": None}, "Order q has no reservation."),
        ({"orders:ann": {"orders": ["q", "q"], "count": 2}}, "orders:ann is"),
        ({"order:q": {"user": "ann", "hotel": "h1"}}, "Order q differs from its reservation."),
    ],
)
def test_the_check_detects_contradictory_objects(
    planted: dict[str, Any], fault: str | None
) -> None:
    application, found = Travel([]), replay()
    found.objects |= planted
    faults = application.faults(found)
    assert bool(faults) is (fault is not None)
    assert fault is None or any(one.startswith(fault) for one in faults)


def test_the_check_detects_a_capacity_that_was_below_zero_for_a_while() -> None:
    found = replay()
    for left_over in (-1, 1):
        writes = {"seats:f0": [["set", ["left"], left_over]]}
        found.add(found.records, json.dumps({"writes": writes}))
    assert Travel([]).faults(found) == ["seats:f0 had -1 left."]


def test_the_check_finds_a_client_that_got_another_answer() -> None:
    application = Travel([])
    application.acknowledged = {"q": True, "lost": True, "other": False}
    assert application.faults(replay()) == [
        "Request lost was answered yes, but the log says otherwise."
    ]
    application.acknowledged = {"q": False}
    assert application.faults(replay()) == [
        "Request q was answered no, but the log says otherwise."
    ]


def test_loading_fits_into_records() -> None:
    application = Travel(generated_hotels())
    batches = application._batches()
    assert len(batches) == application.batches() == 4 + 4 + 17
    hotels = [Hotel(**one) for batch in batches for one in batch["hotels"]]
    assert [msgspec.to_builtins(one)["listed"] for one in hotels] == [True] * 80 + [False] * 20
