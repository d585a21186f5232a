"""Options and filters of the data source, without Spark."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import pytest

from indilog.base.errors import ConfigError
from indilog_pipeline.spark.columns import COLUMNS, check_columns
from indilog_pipeline.spark.filters import narrowed
from indilog_pipeline.spark.options import Bounds, read_options

URL = {"url": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "Give option url"),
        (URL | {"path": "/data"}, "and not both"),
        (URL | {"tag": "a", "tag_int": "1"}, "not both"),
        (URL | {"tag": ""}, "Option tag is the text of a tag, not ''"),
        (URL | {"lgo": "a"}, "There is no option lgo"),
        (URL | {"on_loss": "ignore"}, "Option on_loss is error or skip, not 'ignore'"),
        (URL | {"seqnum_start": "-1"}, "Option seqnum_start is an integer from 0 to"),
        (URL | {"batch_rows": "10"}, "Option batch_rows is an integer from 8,192 to"),
        (URL | {"partition_bytes": "1k"}, "Option partition_bytes is an integer from"),
        (URL | {"ordered_start": "yesterday"}, "Option ordered_start is a number of seconds"),
        (URL | {"ordered_start": "2026-01-31T08:00:00"}, "a time like 2026-01-31T08:00:00Z"),
    ],
)
def test_a_mistake_is_one_sentence(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        read_options(given)


def test_times_are_seconds_or_text_with_a_zone() -> None:
    seconds = read_options(URL | {"ordered_start": "1769846400.5"}).bounds
    text = read_options(URL | {"ordered_start": "2026-01-31T09:00:00.5+01:00"}).bounds
    assert seconds.ordered_start_us == text.ordered_start_us == 1_769_846_400_500_000


def test_the_token_is_not_printed() -> None:
    assert "hidden" not in repr(read_options(URL | {"token": "hidden"}))


def test_a_schema_names_known_columns_of_their_types() -> None:
    assert check_columns(COLUMNS, [("data", "binary"), ("seqnum", "bigint")]) == ["data", "seqnum"]
    for wrong in ([("seqnum", "string")], [("number", "bigint")], []):
        with pytest.raises(ConfigError):
            check_columns(COLUMNS, wrong)


@dataclass
class Compared:
    """A filter as PySpark has it: its class is its meaning."""

    attribute: tuple[str, ...]
    value: object


class EqualTo(Compared):
    """=."""


class GreaterThan(Compared):
    """>."""


class LessThanOrEqual(Compared):
    """<=."""


class In(Compared):
    """One of several values."""


class StringContains(Compared):
    """Says nothing about bounds."""


def test_filters_narrow_the_range() -> None:
    found = narrowed(
        Bounds(start=5, end=100),
        [GreaterThan(("seqnum",), 9), LessThanOrEqual(("seqnum",), 20), In(("seqnum",), (12, 30))],
    )
    assert (found.start, found.end) == (12, 21)
    nothing = narrowed(Bounds(), [EqualTo(("seqnum",), -3)])
    assert nothing.start >= nothing.end


def test_times_become_microseconds() -> None:
    at = datetime.datetime(2026, 1, 31, 8, 0, 0, 7, tzinfo=datetime.UTC)
    micros = 1_769_846_400_000_007
    found = narrowed(Bounds(), [GreaterThan(("ordered_at",), at)])
    assert found.ordered_start_us == micros + 1
    found = narrowed(Bounds(), [LessThanOrEqual(("ordered_at",), at)])
    assert found.ordered_end_us == micros + 1


def test_logs_are_those_of_all_filters() -> None:
    found = narrowed(Bounds(), [In(("log",), ("a", "b")), EqualTo(("log",), "b")])
    assert found.logs == frozenset({"b"})
    assert narrowed(found, [EqualTo(("log",), "a")]).logs == frozenset()


def test_what_says_nothing_about_bounds_changes_nothing() -> None:
    for found in (
        GreaterThan(("data",), b"x"),
        StringContains(("log",), "a"),
        GreaterThan(("seqnum", "x"), 3),
        GreaterThan(("seqnum",), None),
        In(("seqnum",), (3, None)),
        object(),
    ):
        assert narrowed(Bounds(), [found]) == Bounds()
