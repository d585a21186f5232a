"""Graphs of friends: generates the demo's graph, or reads a graph from a file.

`python -m functions.social.graph FILE` checks a file before anything is started.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, TypeAlias

Graph: TypeAlias = dict[str, list[str]]
"""The friends of each person, sorted; friendship is mutual."""

EDGES_MAX: Final = 2_000_000
PEOPLE: Final = 1000
FRIENDS_EACH: Final = 10
_NAME_LENGTH_MAX: Final = 20


class GraphError(Exception):
    """The file is not a graph; the message names the line in one sentence."""


def synthetic_graph(
    *, people: int = PEOPLE, friends_each: int = FRIENDS_EACH, seed: int = 1
) -> Graph:
    """Return a graph built by preferential attachment: people with many friends get more friends.

    Each new person befriends `friends_each` people, chosen in proportion to their number of
    friends, as real networks grow (Barabási and Albert 1999). The same seed gives the same graph.
    """
    chooser = random.Random(seed)  # noqa: S311 - no secret
    edges: list[tuple[str, str]] = []
    ends = [str(person) for person in range(friends_each)]
    for person in range(friends_each, people):
        chosen: set[str] = set()
        while len(chosen) < friends_each:
            chosen.add(chooser.choice(ends))
        for friend in sorted(chosen):
            edges.append((str(person), friend))
            ends += (str(person), friend)
    return graph_of(edges)


def read_graph(file: Path) -> Graph:
    """Return the graph in a file. Each line is a friendship: two integers, separated by white space
    or a comma.

    Further columns (weights, times), empty lines, and lines that begin with `#` or `%` are ignored.
    Repeated friendships, and friendships of a person with themselves, are ignored, too.

    Raises:
        GraphError: the file cannot be read, or a line has another form.
    """
    try:
        with file.open(encoding="utf-8") as lines:
            graph = graph_of(_edges(lines, file.name))
    except OSError as error:
        raise GraphError(f"The graph {file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise GraphError(f"The graph {file} is not text; write two numbers per line.") from error
    if not graph:
        raise GraphError(f"The graph {file} contains no friendship; write two numbers per line.")
    return graph


def _edges(lines: Iterable[str], name: str) -> Iterator[tuple[str, str]]:
    count = 0
    for number, line in enumerate(lines, 1):
        words = line.replace(",", " ").split()
        if not words or words[0].startswith(("#", "%")):
            continue
        if len(words) < 2 or not all(map(_is_number, words[:2])):
            raise GraphError(
                f"{name}, line {number}: two numbers are expected, not {line.strip()!r:.60}."
            )
        count += 1
        if count > EDGES_MAX:
            raise GraphError(
                f"{name} has more than {EDGES_MAX:,} friendships; use a smaller graph."
            )
        yield str(int(words[0])), str(int(words[1]))


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdecimal() and len(word) <= _NAME_LENGTH_MAX


def graph_of(edges: Iterable[tuple[str, str]]) -> Graph:
    """Return the graph with these friendships, with people and friends sorted by number."""
    friends: dict[str, set[str]] = {}
    for one, other in edges:
        if one != other:
            friends.setdefault(one, set()).add(other)
            friends.setdefault(other, set()).add(one)
    return {person: sorted(friends[person], key=int) for person in sorted(friends, key=int)}


def friendships(graph: Graph) -> int:
    """Return the number of pairs of friends."""
    return sum(map(len, graph.values())) // 2


def main() -> None:
    """Read the graph in the file that the argument names. If it is invalid, print why and exit with
    code 2.
    """
    try:
        read_graph(Path(sys.argv[1]))
    except GraphError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
