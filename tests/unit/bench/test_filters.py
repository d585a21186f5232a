"""The benchmark of filters issues reads whose answers follow from the positions of the records."""

from __future__ import annotations

import pytest

from bench.filters import questions_of, tag_of


@pytest.mark.parametrize("tags", [1, 7, 100])
def test_every_answer_is_the_first_record_with_the_tag_from_the_bound_on(tags: int) -> None:
    places = [3 * number + 5 for number in range(200)]
    for tag, place, answer in questions_of(places, tags)[:500]:
        matching = [p for n, p in enumerate(places) if tag_of(n, tags) == tag and p >= place]
        assert matching[0] == answer


def test_bounds_also_lie_between_records() -> None:
    places = list(range(0, 2000, 10))
    assert any(question.place not in places for question in questions_of(places, 5))
