"""The load of the social network: data, clients and check (WORKLOADS 3).

Clients log in, read profiles and timelines, and post ("retwis"). All choices come from a seed. The
demo and `bench.social` run the load by `workload.demonstration`.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from functions.social.graph import Graph, friendships
from functions.workload.load import LoadRequest, Visitor, load_batches
from functions.workload.replay import TraceReplay

MIX: Final = {"login": 15, "profile": 30, "timeline": 50, "post": 5}
"""Percent of the requests (Boki's benchmark)."""
PEOPLE_PER_LOAD: Final = 20
_PUBLIC_PROBABILITY: Final = 0.25


class SocialNetwork:
    """The application `social` with the people of a graph; see `workload.demonstration`.

    Attributes:
        acknowledged: text of each post that was acknowledged, by its id.
        unknown: texts of posts whose request failed; each post may or may not have been published.
    """

    name = "social"
    functions = tuple(MIX)
    loads = "the graph"

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._people = list(graph)
        self.acknowledged: dict[str, str] = {}
        self.unknown: set[str] = set()

    def batches(self) -> int:
        """See `Application`."""
        return -(-len(self._people) // PEOPLE_PER_LOAD)

    async def load(self, url: str, progress: Callable[[int], None]) -> str:
        """Load people and friendships; existing people keep their data."""
        people = self._people
        parts = [people[n : n + PEOPLE_PER_LOAD] for n in range(0, len(people), PEOPLE_PER_LOAD)]
        batches = [{"people": {person: self._graph[person] for person in part}} for part in parts]
        new = sum(await load_batches(url, self.name, batches, progress))
        return f"{len(people):,} people ({new:,} new), {friendships(self._graph):,} friendships"

    def visitors(self, count: int, seed: int) -> list[Visitor]:
        """See `Application`."""
        now = time.time_ns()
        return [Browser(self, self._people, f"{seed}.{now}.{n}", seed + n) for n in range(count)]

    async def settle(self, url: str) -> None:
        """See `Application`; no request leaves work in the background."""

    def faults(self, replay: TraceReplay) -> list[str]:
        """Return which acknowledged posts are lost, changed or duplicated."""
        faults: list[str] = []
        posts = dict(replay.objects_of_kind("post"))
        for post, text in self.acknowledged.items():
            kept = posts.get(post)
            if kept is None:
                faults.append(f"Post {post} was acknowledged and is lost.")
            elif kept["text"] != text:
                faults.append(f"Post {post} has the text {kept['text']!r} instead of {text!r}.")
        published = Counter(post["text"] for post in posts.values())
        return faults + [
            f"The post {text!r} was published {published[text]} times."
            for text in (*self.acknowledged.values(), *self.unknown)
            if published[text] > 1
        ]

    def verdict(self, replay: TraceReplay) -> str:
        """See `Application`."""
        posts = sum(1 for _ in replay.objects_of_kind("post"))
        mine = len(self.acknowledged)
        return (
            f"of {posts:,} posts {mine:,} were acknowledged in this run, none lost or duplicated."
        )


class Browser:
    """One client, which acts as a different person in each request."""

    def __init__(self, network: SocialNetwork, people: Sequence[str], name: str, seed: int) -> None:
        self._network = network
        self._people = people
        self._name = name
        self._choose = random.Random(seed)  # noqa: S311 - no secret
        self._posts = 0

    def request(self) -> LoadRequest:
        """Log in, look at a profile or a timeline, or post."""
        (function,) = self._choose.choices(list(MIX), list(MIX.values()))
        return LoadRequest(function, self._arguments(function))

    def _arguments(self, function: str) -> dict[str, Any]:
        user = self._choose.choice(self._people)
        match function:
            case "login":
                return {"user": user, "password": user}
            case "timeline" if self._choose.random() < _PUBLIC_PROBABILITY:
                return {}
            case "post":
                self._posts += 1
                # The text is unique, also across runs, so that the check detects lost and
                # duplicated posts.
                return {"user": user, "text": f"Post {self._posts} of client {self._name}"}
            case _:
                return {"user": user}

    def answered(self, request: LoadRequest, result: bytes) -> None:
        """Remember a post that was acknowledged."""
        if request.function == "post":
            self._network.acknowledged[json.loads(result)] = request.arguments["text"]

    def failed(self, request: LoadRequest) -> None:
        """Remember a post that may have been published."""
        if request.function == "post":
            self._network.unknown.add(request.arguments["text"])
