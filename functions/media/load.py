"""The load of movie reviews: data, clients and check (WORKLOADS 5). The demo and `bench.media` run
it by `workload.demonstration`.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

from functions.media.app import LOADED_MAX, REVIEWS_LISTED_MAX
from functions.workload.http_connection import HttpConnection
from functions.workload.load import LoadRequest, Visitor, call, load_batches
from functions.workload.replay import TraceReplay

USERS: Final = 1000
MOVIES: Final = 1000
WORDS: Final = (
    "slow", "bright", "tender", "loud", "clever", "endless", "honest", "strange", "warm", "bold",
)  # fmt: skip


class Media:
    """The application `media`; see `workload.demonstration`.

    Attributes:
        acknowledged: the text of each review that was acknowledged, by its id.
        unknown: requests that failed and may have taken effect; `settle` repeats them.
    """

    name = "media"
    functions = ("compose",)
    loads = "users and movies"

    def __init__(self, *, users: int = USERS, movies: int = MOVIES) -> None:
        self.users = [f"user {number}" for number in range(users)]
        self.movies = {f"Movie {number}": f"m{number}" for number in range(movies)}
        self.acknowledged: dict[str, str] = {}
        self.unknown: dict[str, LoadRequest] = {}

    def batches(self) -> int:
        """See `Application`."""
        return len(self._batches())

    def _batches(self) -> list[dict[str, Any]]:
        users, movies = self.users, list(self.movies.items())
        return [
            {"users": users[n : n + LOADED_MAX], "movies": {}}
            for n in range(0, len(users), LOADED_MAX)
        ] + [
            {"users": [], "movies": dict(movies[n : n + LOADED_MAX])}
            for n in range(0, len(movies), LOADED_MAX)
        ]

    async def load(self, url: str, progress: Callable[[int], None]) -> str:
        """Load users and movies; existing users and movies keep their reviews."""
        new = sum(await load_batches(url, self.name, self._batches(), progress))
        return f"{len(self.users):,} users, {len(self.movies):,} movies ({new:,} new)"

    def visitors(self, count: int, seed: int) -> list[Visitor]:
        """See `Application`."""
        now = time.time_ns()
        return [Reviewer(self, f"{seed}.{now}.{number}", seed + number) for number in range(count)]

    async def settle(self, url: str) -> None:
        """Repeat the requests whose outcome is unknown. Afterwards each of them has left one
        review.
        """
        connection = HttpConnection(url)
        try:
            for request in list(self.unknown.values()):
                review = await call(connection, self.name, request.function, request.arguments)
                self.keep(request, review)
        finally:
            connection.close()

    def keep(self, request: LoadRequest, review: str) -> None:
        """Remember a review that was acknowledged."""
        self.acknowledged[review] = request.arguments["text"]
        self.unknown.pop(request.arguments["request"], None)

    def faults(self, replay: TraceReplay) -> list[str]:
        """Return which reviews are lost, changed, or not exactly once in each of their three
        places.
        """
        reviews = dict(replay.objects_of_kind("review"))
        faults = []
        for review, text in self.acknowledged.items():
            if review not in reviews:
                faults.append(f"Review {review} was acknowledged and is lost.")
            elif reviews[review]["text"] != text:
                faults.append(f"Review {review} has another text than was acknowledged.")
        texts = Counter(review["text"] for review in reviews.values())
        faults += [
            f"The review {text!r} was published {texts[text]} times."
            for text in self.acknowledged.values()
            if texts[text] > 1
        ]
        for kind in ("user", "movie"):
            faults += _faults_of_lists(kind, replay, reviews.values())
        return faults

    def verdict(self, replay: TraceReplay) -> str:
        """See `Application`."""
        reviews = sum(1 for _ in replay.objects_of_kind("review"))
        return (
            f"of {reviews:,} reviews {len(self.acknowledged):,} were acknowledged in this run; "
            "each is "
            "stored once by its id, its user and its movie."
        )


def _faults_of_lists(
    kind: str, replay: TraceReplay, reviews: Iterable[dict[str, Any]]
) -> Iterable[str]:
    """Compare the lists and counts of users or movies with the existing reviews, in log order."""
    expected: dict[str, list[dict[str, Any]]] = {}
    for review in reviews:
        expected.setdefault(review[kind], []).append(review)
    listed = dict(replay.objects_of_kind(kind))
    for name in expected.keys() | listed.keys():
        there = expected.get(name, [])
        wanted = {
            "count": len(there),
            "stars": sum(review["rating"] for review in there),
            "reviews": [review["id"] for review in there][-REVIEWS_LISTED_MAX:],
        }
        shown = {field: listed.get(name, {}).get(field) for field in wanted}
        if shown != wanted:
            yield f"{kind}:{name} lists {shown}, but there are {wanted}."


class Reviewer:
    """One client. Each request has another user and movie; failed requests are repeated."""

    def __init__(self, media: Media, name: str, seed: int) -> None:
        self._media = media
        self._name = name
        self._choose = random.Random(seed)  # noqa: S311 - no secret
        self._users = media.users
        self._titles = list(media.movies)
        self._requests = 0
        self._again: LoadRequest | None = None

    def request(self) -> LoadRequest:
        """Compose a review; if the last request failed, repeat it instead."""
        if self._again is not None:
            return self._again
        self._requests += 1
        number = f"{self._name}.{self._requests}"
        words = " ".join(self._choose.sample(WORDS, 3))
        return LoadRequest(
            "compose",
            {
                "request": number,
                "user": self._choose.choice(self._users),
                "title": self._choose.choice(self._titles),
                "text": f"A {words} film (request {number}).",
                "rating": self._choose.randint(0, 10),
            },
        )

    def answered(self, request: LoadRequest, result: bytes) -> None:
        """Remember a review that was acknowledged."""
        self._again = None
        self._media.keep(request, json.loads(result))

    def failed(self, request: LoadRequest) -> None:
        """Remember a review that may exist, and repeat the request."""
        self._again = request
        self._media.unknown[request.arguments["request"]] = request
