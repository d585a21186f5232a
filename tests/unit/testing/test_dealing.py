"""The order in which several processes get the tests."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest

from tests.support.dealing import dealt


class _Test:
    def __init__(self, file: str, number: int, *marks: str) -> None:
        self.path, self.number, self.marks = Path(file), number, marks

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None


def _tests(*files: tuple[str, int, tuple[str, ...]]) -> list[pytest.Item]:
    tests = [_Test(file, n, *marks) for file, count, marks in files for n in range(count)]
    return cast("list[pytest.Item]", tests)


def test_each_part_begins_with_long_tests_and_one_part_has_all_of_spark() -> None:
    tests = _tests(
        ("unit-1", 20, ()), ("cluster-1", 4, ("cluster",)), ("spark-1", 3, ("spark", "heavy")),
        ("unit-2", 25, ()), ("cluster-2", 4, ("cluster",)), ("heavy", 5, ("heavy",)),
        ("spark-2", 1, ("spark",)), ("zookeeper", 2, ("zookeeper",)), ("unit-3", 1, ()),
    )  # fmt: skip
    found = dealt(tests, 4)
    assert sorted(map(id, found)) == sorted(map(id, tests))
    parts = [[cast("_Test", item) for item in found[at : at + 16]] for at in (0, 16, 32, 48)]
    for part in parts:
        is_long = [bool(test.marks) for test in part]
        assert is_long == sorted(is_long, reverse=True)
        assert any(is_long)
    assert [("spark" in test.marks) for test in parts[0]].count(True) == 4
    names = [str(test.path) for part in parts for test in part if test.marks]
    changes = [name for name, following in pairwise(names) if name != following]
    assert len(changes) == 5, "the tests of a file stay together"


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_no_test_is_lost_or_doubled_for_any_number_of_processes(processes: int) -> None:
    tests = _tests(("a", 3, ("cluster",)), ("b", 1, ()), ("c", 2, ("spark",)))
    assert sorted(map(id, dealt(tests, processes))) == sorted(map(id, tests))
    assert dealt([], processes) == []
