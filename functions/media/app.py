"""Functions that compose movie reviews from five parts, which are computed concurrently.

`compose` starts a workflow. Its five steps run in parallel (`wf.gather`); each calls the function
that computes one part: a unique id, the user, the movie's id, the text, the rating. A transaction
then stores the review in three places. The log decides each step once, and the id of the request is
the id of the run. So a request leaves one review, however often it is repeated, and a run that was
interrupted continues with the parts that it has.

The state consists of BokiStore objects in the log `media`: `user:{name}` and `movie:{id}` (number
of reviews, and the newest reviews), `title:{title}` (the movie's id), `review:{id}`. The runs of
workflows are in the log `media/flow`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

from bokiflow import Flow, Workflow
from bokistore import Obj, Store, Transaction
from indilog import App, Context

app = App("media")
flow = Flow(app)

LOG: Final = "media"
TEXT_LENGTH_MAX: Final = 2000
RATING_MAX: Final = 10
REVIEWS_LISTED_MAX: Final = 100
"""Number of newest reviews that are listed for a user or a movie; all reviews are counted."""
REVIEWS_SHOWN_MAX: Final = 8
PART_RETRIES: Final = 10
"""Further calls of a function that computes a part, after its worker crashed."""
LOADED_MAX: Final = 30
"""Users or movies loaded by one record: a movie has two objects, and a record has at most 64
tags.
"""
OBJECTS_SHOWN_MAX: Final = 1000
_NAME_LENGTH_MAX: Final = 128

Part: TypeAlias = dict[str, Any]
"""A field of a review and its value; None: there is no such user or movie."""


@dataclass(frozen=True)
class Draft:
    """What a user wrote; `id` is the id of the review."""

    id: str
    user: str
    title: str
    text: str
    rating: int


@dataclass(frozen=True)
class Composed:
    """The outcome of a request: the id of the review, or the name of the unknown user or movie."""

    review: str = ""
    unknown: str = ""


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

    To repeat a request whose outcome is unknown, pass the same `request`: there will be one review,
    or the same refusal. Without `request`, each call is a new request. Asynchronous calls, and
    calls with an idempotency key, are repeated by the platform until they have an outcome.
    """
    if len(text) > TEXT_LENGTH_MAX:
        raise ValueError(f"A review has at most {TEXT_LENGTH_MAX} characters, not {len(text)}.")
    if not 0 <= rating <= RATING_MAX:
        raise ValueError(f"A rating must be 0 to {RATING_MAX}, not {rating}.")
    _checked("user", user)
    _checked("title", title)
    request = ctx.invocation_id if request is None else _checked("request", request)
    draft = Draft(_review_id(request), user, title, text, rating)
    handle = await composing.start(draft, id=f"compose:{draft.id}")
    composed = await handle.result()
    if composed.unknown:
        raise LookupError(f"There is no {composed.unknown}; load it first.")
    return composed.review


@app.function
async def unique_id(review: str) -> Part:
    """Compute the review's id."""
    return {"id": review}


@app.function
async def user_id(ctx: Context, user: str) -> Part:
    """Look up the author."""
    known = await _store(ctx).get(f"user:{user}")
    return {"user": user if known else None}


@app.function
async def movie_id(ctx: Context, title: str) -> Part:
    """Look up the id of the movie with this title."""
    known = await _store(ctx).get(f"title:{title}")
    return {"movie": known["movie"] if known else None}


@app.function
async def clean_text(text: str) -> Part:
    """Compute the text that is stored."""
    return {"text": text.strip()}


@app.function
async def checked_rating(rating: int) -> Part:
    """Compute the rating that is stored."""
    return {"rating": rating}


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


# --- the workflow


@flow.workflow
async def composing(wf: Workflow, draft: Draft) -> Composed:
    """Compute the five parts concurrently, then store the review."""
    parts: Part = {}
    for part in await wf.gather(
        _part(wf, unique_id, review=draft.id),
        _part(wf, user_id, user=draft.user),
        _part(wf, movie_id, title=draft.title),
        _part(wf, clean_text, text=draft.text),
        _part(wf, checked_rating, rating=draft.rating),
    ):
        parts |= part
    if parts["user"] is None:
        return Composed(unknown=f"user {draft.user!r}")
    if parts["movie"] is None:
        return Composed(unknown=f"movie {draft.title!r}")
    review = Review(**parts)

    async def store(txn: Transaction) -> None:
        await store_review(txn, review)

    await wf.transact(Store(wf.log(LOG)), store)
    return Composed(review.id)


def _part(
    wf: Workflow,
    function: Callable[..., Coroutine[Any, Any, Part]],
    **arguments: Any,  # noqa: ANN401 - those of the function
) -> Coroutine[Any, Any, Part]:
    """Compute a part in a separate step, which calls the function again after a crash."""

    async def part(ctx: Context) -> Part:
        computed: Part = await ctx.call(function, **arguments)
        return computed

    return wf.step(part, name=function.__name__, retries=PART_RETRIES)


async def store_review(txn: Transaction, review: Review) -> None:
    """Store a review under its id, with its user and with its movie. Change nothing if an earlier
    run of the request, which is no longer kept, has stored the review.
    """
    kept = await txn.get(f"review:{review.id}")
    if kept:
        return
    kept.set("", asdict(review))
    for place in (f"user:{review.user}", f"movie:{review.movie}"):
        txn.push(place, "reviews", review.id, limit=REVIEWS_LISTED_MAX)
        txn.increment(place, "count")
        txn.increment(place, "stars", review.rating)


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
    """Return the id of a request's review: unique, and the same for each repetition of the
    request.
    """
    return hashlib.blake2b(request.encode(), digest_size=8).hexdigest()


def _checked(what: str, text: str) -> str:
    if not text or len(text) > _NAME_LENGTH_MAX or not text.isprintable():
        raise ValueError(f"A {what} must be 1 to {_NAME_LENGTH_MAX} characters, not {text!r:.80}.")
    return text
