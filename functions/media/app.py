"""Functions that compose movie reviews from five parts, which arrive in any order.

`compose` runs five functions in parallel. Each computes one part (a unique id, the user, the
movie's id, the text, the rating) and adds the part to the upload with one append. The log's order
decides which part is the fifth. The call that added the fifth part stores the review in three
places with one transaction. A request leaves one review, however often it is repeated after
failures.

The state consists of BokiStore objects in the log `media`: `user:{name}` and `movie:{id}` (number
of reviews, and the newest ones), `title:{title}` (the movie's id), `review:{id}`, and
`upload:{request}` until its review is stored.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from bokistore import Obj, Store, Transaction
from indilog import App, Context, OutcomeUnknownError

app = App("media")

LOG: Final = "media"
PARTS: Final = ("id", "user", "movie", "text", "rating")
TEXT_LENGTH_MAX: Final = 2000
RATING_MAX: Final = 10
REVIEWS_LISTED_MAX: Final = 100
"""Number of newest reviews that are listed for a user or a movie; all reviews are counted."""
REVIEWS_SHOWN_MAX: Final = 8
UPLOAD_RETRIES: Final = 3
LOADED_MAX: Final = 30
"""Users or movies loaded by one record: a movie has two objects, and a record has at most 64
tags.
"""
OBJECTS_SHOWN_MAX: Final = 1000
_NAME_LENGTH_MAX: Final = 128


@dataclass(frozen=True)
class Review:
    """A review of a movie; `movie` is its id."""

    id: str
    user: str
    movie: str
    text: str
    rating: int


@dataclass(frozen=True)
class Reviews:
    """The reviews of a movie, or by a user.

    Attributes:
        count: number of all reviews.
        mean: mean of their ratings; None: there are no reviews.
        newest: the newest reviews, newest first.
    """

    count: int
    mean: float | None
    newest: list[Review]


@app.function
async def compose(
    ctx: Context, user: str, title: str, text: str, rating: int, request: str | None = None
) -> str:
    """Publish a review; return its id.

    To repeat a request whose outcome is unknown, pass the same `request`: there will be one review.
    Without `request`, each call is a new request. Asynchronous calls, and calls with an idempotency
    key, are repeated by the platform until they have an outcome.
    """
    if len(text) > TEXT_LENGTH_MAX:
        raise ValueError(f"A review has at most {TEXT_LENGTH_MAX} characters, not {len(text)}.")
    if not 0 <= rating <= RATING_MAX:
        raise ValueError(f"A rating must be 0 to {RATING_MAX}, not {rating}.")
    request = ctx.invocation_id if request is None else _checked("request", request)
    found = await asyncio.gather(
        _uploaded(ctx, upload_user, request, user=user),
        _uploaded(ctx, upload_movie_id, request, title=title),
        _uploaded(ctx, upload_unique_id, request),
        _uploaded(ctx, upload_text, request, text=text),
        _uploaded(ctx, upload_rating, request, rating=rating),
    )
    for known, what in zip(found, (f"user {user!r}", f"movie {title!r}"), strict=False):
        if not known:
            await _store(ctx).delete(f"upload:{request}")
            raise LookupError(f"There is no {what}; load it first.")
    return _review_id(request)


@app.function
async def upload_unique_id(ctx: Context, request: str) -> None:
    """Add the review's id."""
    await _add(ctx, request, "id", _review_id(request))


@app.function
async def upload_user(ctx: Context, request: str, user: str) -> bool:
    """Add the author; return whether there is such a user."""
    known = await _store(ctx).get(f"user:{_checked('user', user)}")
    if known:
        await _add(ctx, request, "user", user)
    return known.exists


@app.function
async def upload_movie_id(ctx: Context, request: str, title: str) -> bool:
    """Add the id of the movie with that title; return whether there is one."""
    known = await _store(ctx).get(f"title:{_checked('title', title)}")
    if known:
        await _add(ctx, request, "movie", known["movie"])
    return known.exists


@app.function
async def upload_text(ctx: Context, request: str, text: str) -> None:
    """Add the text."""
    await _add(ctx, request, "text", text.strip())


@app.function
async def upload_rating(ctx: Context, request: str, rating: int) -> None:
    """Add the rating."""
    await _add(ctx, request, "rating", rating)


@app.function
async def movie(ctx: Context, title: str) -> Reviews:
    """Return the reviews of a movie."""
    store = _store(ctx)
    known = await store.get(f"title:{_checked('title', title)}")
    if not known:
        raise LookupError(f"There is no movie {title!r}; load it first.")
    return await _reviews(store, await store.get(f"movie:{known['movie']}"))


@app.function
async def reader(ctx: Context, user: str) -> Reviews:
    """Return the reviews by a user."""
    store = _store(ctx)
    known = await store.get(f"user:{_checked('user', user)}")
    if not known:
        raise LookupError(f"There is no user {user!r}; load it first.")
    return await _reviews(store, known)


@app.function
async def load(ctx: Context, users: list[str], movies: dict[str, str]) -> int:
    """Add users and movies (id by title); return how many are new.

    One record adds all of them. Existing users and movies keep their reviews.
    """
    if len(users) + len(movies) > LOADED_MAX:
        raise ValueError(
            f"Load at most {LOADED_MAX} users and movies per call, not {len(users) + len(movies)}."
        )
    wanted: dict[str, dict[str, Any]] = {
        f"user:{_checked('user', user)}": {"user": user} | _NO_REVIEWS for user in users
    }
    for title, number in movies.items():
        wanted[f"title:{_checked('title', title)}"] = {"movie": number}
        wanted[f"movie:{_checked('movie id', number)}"] = {"title": title} | _NO_REVIEWS

    async def body(txn: Transaction) -> int:
        found = await asyncio.gather(*[txn.get(name) for name in wanted])
        new = [obj for obj in found if not obj]
        for obj in new:
            obj.set("", wanted[obj.name])
        return sum(not obj.name.startswith("title:") for obj in new)

    return await _store(ctx).transact(body)


@app.function
async def objects(ctx: Context, names: list[str]) -> list[dict[str, Any] | None]:
    """Return the values of objects in the store, None for those that do not exist."""
    if len(names) > OBJECTS_SHOWN_MAX:
        raise ValueError(f"Ask for at most {OBJECTS_SHOWN_MAX} objects, not {len(names)}.")
    store = _store(ctx)
    found = await asyncio.gather(*[store.get(name) for name in names])
    return [obj.value if obj else None for obj in found]


_NO_REVIEWS: Final[dict[str, Any]] = {"count": 0, "stars": 0, "reviews": []}


def _store(ctx: Context) -> Store:
    return Store(ctx.log(LOG))


async def _uploaded(
    ctx: Context, function: Callable[..., Coroutine[Any, Any, Any]], request: str, **part: object
) -> bool | None:
    """Call a function that adds a part. Repeat the call after a crash, which is harmless."""
    arguments: dict[str, Any] = {"request": request, **part}
    for retry in range(UPLOAD_RETRIES + 1):
        try:
            known: bool | None = await ctx.call(function, **arguments)
        except OutcomeUnknownError:
            if retry == UPLOAD_RETRIES:
                raise
        else:
            return known
    raise AssertionError("the last try returns or raises")


async def _add(ctx: Context, request: str, part: str, value: str | int) -> None:
    """Add a part to an upload. Store the review if no part is missing.

    The append returns the parts that precede it in the log's order. So of five concurrent appends,
    one gets the other four parts. If the part is already there, the request is a repetition, and
    its first run may have ended before it stored the review.
    """
    store = _store(ctx)
    before = await store.merge(f"upload:{request}", "", {part: value})
    parts = {**(before if isinstance(before, dict) else {}), part: value}
    if all(part in parts for part in PARTS):
        await store_review(store, request, parts)


async def store_review(store: Store, request: str, parts: Mapping[str, Any]) -> None:
    """Store a review under its id, with its user and with its movie, unless it is already
    stored.
    """
    review = Review(**parts)

    async def body(txn: Transaction) -> None:
        kept = await txn.get(f"review:{review.id}")
        if not kept:
            kept.set("", asdict(review))
            for place in (f"user:{review.user}", f"movie:{review.movie}"):
                txn.push(place, "reviews", review.id, limit=REVIEWS_LISTED_MAX)
                txn.increment(place, "count")
                txn.increment(place, "stars", review.rating)
        txn.delete(f"upload:{request}")

    await store.transact(body)


async def _reviews(store: Store, listed: Obj) -> Reviews:
    newest = listed["reviews"][: -REVIEWS_SHOWN_MAX - 1 : -1]
    found = await store.multi_get([f"review:{review}" for review in newest])
    count = listed["count"]
    return Reviews(
        count=count,
        mean=listed["stars"] / count if count else None,
        newest=[Review(**review.value) for review in found.values()],
    )


def _review_id(request: str) -> str:
    """Return the id of a request's review, which is unique, and the same for each repetition of the
    request.
    """
    return hashlib.blake2b(request.encode(), digest_size=8).hexdigest()


def _checked(what: str, text: str) -> str:
    if not text or len(text) > _NAME_LENGTH_MAX or not text.isprintable():
        raise ValueError(f"A {what} must be 1 to {_NAME_LENGTH_MAX} characters, not {text!r:.80}.")
    return text
