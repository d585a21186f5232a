"""What every `Log` shares (`indilog.base.log`); the contract suite covers the rest."""

from __future__ import annotations

import pytest

from indilog.base.errors import InvalidTagError, TooLargeError
from indilog.base.ids import MAX_SEQNUM, UserTag, tag_columns
from indilog.base.log import (
    READ_RANGE_LIMIT_MAX,
    Record,
    Session,
    check_bound,
    check_limit,
    check_record,
)


def record(seqnum: int = 1, data: bytes = b"x", tags: tuple[UserTag, ...] = ("a", 7)) -> Record:
    return Record(seqnum, tag_columns("orders", tags)[1], data, 1.5, 2.5)


def test_a_record_returns_its_tags_as_they_were_appended() -> None:
    assert record().tags == ("a", 7)


def test_records_with_equal_position_and_contents_are_equal() -> None:
    assert record() == record()
    assert len({record(), record()}) == 1
    assert record() != record(seqnum=2)
    assert record() != record(data=b"y")
    assert record() != record(tags=("a",))
    assert record() != "something else"


def test_a_records_repr_stays_short() -> None:
    assert len(repr(record(data=b"x" * 10_000))) < 120


def test_the_position_of_a_session_never_decreases() -> None:
    session = Session(3)
    session.saw(7)
    session.saw(5)
    assert session.position == 7


def test_a_record_at_the_limits_is_accepted() -> None:
    check_record(b"x" * 10, ["a"] * 2, bytes_max=10, tags_max=2)


def test_a_record_over_a_limit_is_refused_and_the_limit_named() -> None:
    # PITFALLS A33: the append fails at once with the limit in the message.
    with pytest.raises(TooLargeError, match="11, the limit is 10"):
        check_record(b"x" * 11, [], bytes_max=10, tags_max=2)
    with pytest.raises(TooLargeError, match="3, the limit is 2"):
        check_record(b"", ["a", "b", "c"], bytes_max=10, tags_max=2)


def test_text_is_neither_data_nor_a_list_of_tags() -> None:
    with pytest.raises(TypeError, match="encode it first"):
        check_record("text", [], bytes_max=10, tags_max=2)  # type: ignore[arg-type]
    with pytest.raises(InvalidTagError, match=r"write tags=\['ab'\]"):
        check_record(b"", "ab", bytes_max=10, tags_max=2)


def test_a_bound_above_every_seqnum_is_reduced_to_the_last_seqnum() -> None:
    assert check_bound(0) == 0
    assert check_bound(MAX_SEQNUM + 1) == MAX_SEQNUM


@pytest.mark.parametrize("bound", [-1, 1.0, True, "1", None])
def test_a_value_that_is_no_seqnum_is_refused_as_a_bound(bound: object) -> None:
    with pytest.raises(ValueError, match="A bound must be a seqnum"):
        check_bound(bound)  # type: ignore[arg-type]


def test_a_page_has_at_least_one_record_and_a_largest_size() -> None:
    assert check_limit(READ_RANGE_LIMIT_MAX) == READ_RANGE_LIMIT_MAX
    for limit in (0, -1, READ_RANGE_LIMIT_MAX + 1):
        with pytest.raises(ValueError, match="limit must be 1 to"):
            check_limit(limit)
