"""The reviews' functions over a log in memory, their check, and their demo."""

from __future__ import annotations

import asyncio
import io
from functools import partial
from typing import Any

import pytest
from rich.console import Console

from bokiflow import RunFailedError
from bokistore import Obj, Store
from functions.media import app as media
from functions.media.load import Media
from functions.workload.demonstration import demonstrate, show
from functions.workload.replay import TraceReplay
from indilog.base.errors import FunctionFailedError, WorkerCrashedError
from indilog.base.log import Session
from indilog.testing import MemoryLogs
from indilog.testing.stepper import Choose, SteppedLog, interleavings, run_stepped
from tests.unit.functions.stand_in import Functions, serving

PARTS: dict[str, Any] = {"id": "r1", "user": "ann", "movie": "m1", "text": "Good.", "rating": 7}
PARTS_COMPUTED = ["checked_rating", "clean_text", "movie_id", "unique_id", "user_id"]
EMPTY = {"count": 0, "stars": 0, "reviews": []}
REVIEW: dict[str, Any] = {"user": "ann", "title": "Up", "text": "Good.", "rating": 7}


async def with_ann_and_up() -> Functions:
    functions = Functions(media.app)
    assert await media.load(functions.context(), ["ann"], {"Up": "m1"}) == 2
    return functions


def objects_of(functions: Functions) -> Store:
    return Store(functions.logs.log("media"))


@pytest.mark.asyncio
async def test_a_review_is_stored_with_itself_its_user_and_its_movie() -> None:
    functions = await with_ann_and_up()
    review = await media.compose(functions.context(), **REVIEW, request="q")
    expected = media.Review(review, "ann", "m1", "Good.", 7)
    assert await media.movie(functions.context(), "Up") == media.Reviews(1, 7.0, [expected])
    assert await media.reader(functions.context(), "ann") == media.Reviews(1, 7.0, [expected])
    assert sorted(functions.calls) == PARTS_COMPUTED


class Meeting(Functions):
    """Functions that return only when all five parts are being computed."""

    def __init__(self) -> None:
        super().__init__(media.app)
        self.together = asyncio.Event()

    async def call(
        self, function: str, arguments: bytes, session: Session, *, key: str = "", holder: str = ""
    ) -> bytes:
        result = await super().call(function, arguments, session, key=key)
        if len(self.calls) == len(PARTS_COMPUTED):
            self.together.set()
        await self.together.wait()
        return result


@pytest.mark.asyncio
async def test_the_five_parts_are_computed_concurrently() -> None:
    functions = Meeting()
    await media.load(functions.context(), ["ann"], {"Up": "m1"})
    async with asyncio.timeout(60):
        await media.compose(functions.context(), **REVIEW, request="q")


@pytest.mark.asyncio
async def test_a_repeated_request_computes_no_part_again() -> None:
    functions = await with_ann_and_up()
    reviews = {await media.compose(functions.context(), **REVIEW, request="q") for _ in range(3)}
    assert len(reviews) == 1
    assert sorted(functions.calls) == PARTS_COMPUTED
    assert (await media.movie(functions.context(), "Up")).count == 1
    assert (await media.reader(functions.context(), "ann")).count == 1


class Dying(Functions):
    """Functions whose workers crash after a run, the first `deaths` times each."""

    deaths = 0

    async def call(
        self, function: str, arguments: bytes, session: Session, *, key: str = "", holder: str = ""
    ) -> bytes:
        result = await super().call(function, arguments, session, key=key)
        if self.calls.count(function.removeprefix("media.")) <= self.deaths:
            raise WorkerCrashedError("It died.")
        return result


@pytest.mark.asyncio
async def test_a_part_is_computed_again_after_a_crash_and_the_review_is_stored_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(media, "PART_RETRIES", 2)
    functions = Dying(media.app)
    await media.load(functions.context(), ["ann"], {"Up": "m1"})
    functions.deaths = 2
    await media.compose(functions.context(), **REVIEW, request="q")
    assert (await media.movie(functions.context(), "Up")).count == 1
    assert len(functions.calls) == 5 * (1 + 2)
    functions.deaths = 1000
    for _ in range(2):  # the failure is an outcome, like a result
        with pytest.raises(RunFailedError, match="WorkerCrashedError"):
            await media.compose(functions.context(), **REVIEW, request="r")
    assert (await media.movie(functions.context(), "Up")).count == 1


def stored_twice(choose: Choose) -> dict[str, Obj]:
    logs = MemoryLogs()
    log = logs.log("media")
    setup = Store(log)

    async def prepared() -> None:
        for name in ("user:ann", "movie:m1"):
            await setup.set(name, "", {"name": name, **EMPTY})

    run_stepped([prepared()], lambda ready: ready[0])
    store = partial(media.store_review, review=media.Review(**PARTS))
    both = [Store(SteppedLog(log)).transact(store, id=name) for name in ("a", "b")]
    run_stepped(both, choose)
    names = ["user:ann", "movie:m1", "review:r1"]
    (found,) = run_stepped([Store(log).multi_get(names)], lambda ready: ready[0])
    return found


def test_two_runs_of_one_request_store_one_review_in_every_interleaving() -> None:
    tried = 0
    for found in interleavings(stored_twice):
        tried += 1
        assert found["user:ann"]["reviews"] == found["movie:m1"]["reviews"] == ["r1"]
        assert (found["movie:m1"]["count"], found["movie:m1"]["stars"]) == (1, 7)
        assert found["review:r1"].value == PARTS
    assert tried > 5


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"user": "bob"}, "There is no user 'bob'"),
        ({"title": "Down"}, "There is no movie 'Down'"),
        ({"text": "x" * 2001}, "at most 2000 characters"),
        ({"rating": 11}, "A rating must be 0 to 10"),
        ({"request": "\n"}, "1 to 128 characters"),
    ],
)
async def test_an_invalid_review_is_refused_without_any_write(
    wrong: dict[str, Any], sentence: str
) -> None:
    functions = await with_ann_and_up()
    with pytest.raises((ValueError, LookupError, FunctionFailedError), match=sentence):
        await media.compose(functions.context(), **{**REVIEW, "request": "q", **wrong})
    assert not await objects_of(functions).get(f"review:{media._review_id('q')}")
    assert (await media.movie(functions.context(), "Up")).count == 0


@pytest.mark.asyncio
async def test_only_the_newest_reviews_are_listed_and_all_are_counted() -> None:
    functions = await with_ann_and_up()
    made = [await media.compose(functions.context(), **REVIEW, request=str(n)) for n in range(105)]
    movie = await media.movie(functions.context(), "Up")
    assert (movie.count, movie.mean) == (105, 7.0)
    assert [review.id for review in movie.newest] == made[:-9:-1]
    assert (await objects_of(functions).get("movie:m1"))["reviews"] == made[5:]


@pytest.mark.asyncio
async def test_reloading_keeps_reviews() -> None:
    functions = await with_ann_and_up()
    await media.compose(functions.context(), **REVIEW)
    assert await media.load(functions.context(), ["ann", "bob"], {"Up": "m1"}) == 1
    assert (await media.movie(functions.context(), "Up")).count == 1
    with pytest.raises(ValueError, match="at most 30"):
        await media.load(functions.context(), [str(n) for n in range(31)], {})


@pytest.mark.asyncio
async def test_the_demo_retries_failed_requests_and_finds_each_review_once() -> None:
    async with serving(media.app) as gateway:
        fails = iter([True, False, True])  # few requests, so that a slow machine finishes in time

        def tamper(function: str, result: bytes) -> bytes | tuple[int, bytes]:
            if function == "compose" and next(fails, False):
                return 500, b'{"detail":"The worker died.","retryable":false}'
            return result

        gateway.tamper = tamper
        application = Media(users=40, movies=20)
        console = Console(file=io.StringIO(), width=160)
        outcome = await demonstrate(
            gateway.url,
            application,
            seconds=0.2,
            clients=4,
            seed=1,
            requests_min=60,
            console=console,
        )
        show(application, outcome, console)
        assert outcome.faults == []
        assert outcome.run.tallies["compose"].failures["The worker died."] > 0
        assert isinstance(console.file, io.StringIO)
        assert "once by its id" in " ".join(console.file.getvalue().split())


def test_the_check_detects_missing_and_duplicate_reviews() -> None:
    application = Media(users=1, movies=1)
    application.acknowledged = {"r1": "a", "r2": "b", "r3": "c"}
    movie = {"title": "Up", "count": 2, "stars": 9, "reviews": ["r2", "r3"]}
    replay = TraceReplay(
        objects={
            "review:r2": PARTS | {"id": "r2", "text": "x", "rating": 4},
            "review:r3": PARTS | {"id": "r3", "text": "c", "rating": 5},
            "user:ann": {"user": "ann", "count": 1, "stars": 5, "reviews": ["r3"]},
            "user:bob": {"user": "bob", **EMPTY},
            "movie:m1": movie,
        }
    )
    faults = application.faults(replay)
    assert faults[:2] == [
        "Review r1 was acknowledged and is lost.",
        "Review r2 has another text than was acknowledged.",
    ]
    assert len(faults) == 3
    assert faults[2].startswith("user:ann lists ")
    movie["reviews"] = ["r2", "r3", "r3"]
    assert application.faults(replay)[3].startswith("movie:m1 lists ")
