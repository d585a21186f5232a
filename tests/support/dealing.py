"""The order of tests for several processes that take tests from each other.

With `--dist worksteal` each process first gets an equal part of the list, in its order. One that
has none left takes the last half of another's. So each part begins with long tests and ends with
short ones, and no process runs a long test after all others have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

import pytest

_LONG: Final = ("cluster", "zookeeper", "browser", "heavy")
"""Marks of tests that take seconds; others take milliseconds."""
_SPARK_COST: Final = 2
"""How much longer a test with Spark takes than other long ones."""


def dealt(items: Sequence[pytest.Item], processes: int) -> list[pytest.Item]:
    """Return all tests in a new order; the tests of a file stay together.

    All tests with Spark come first, so they run in the first process, which has the only session.
    """
    spark = [item for item in items if item.get_closest_marker("spark")]
    others = [item for item in items if not item.get_closest_marker("spark")]
    files = [list(of_file) for _, of_file in groupby(others, key=lambda item: item.path)]
    files.sort(key=_cost, reverse=True)
    parts = [list(spark), *([] for _ in range(processes - 1))]
    costs = [_SPARK_COST * len(spark), *(0 for _ in range(processes - 1))]
    short = [of_file for of_file in files if not _cost(of_file)]
    for of_file in files[: len(files) - len(short)]:
        least = costs.index(min(costs))
        parts[least] += of_file
        costs[least] += _cost(of_file)
    rest = [item for of_file in short for item in of_file]
    for index, part in enumerate(parts):
        size = (len(items) - sum(map(len, parts[:index]))) // (processes - index)
        missing = max(0, size - len(part))
        part.extend(rest[:missing])
        del rest[:missing]
    return [item for part in parts for item in part] + rest


def _cost(items: Iterable[pytest.Item]) -> int:
    return sum(any(item.get_closest_marker(mark) for mark in _LONG) for item in items)
