"""Tags and identifiers (`indilog.base.ids`)."""

from __future__ import annotations

import pytest

from indilog.base.errors import InvalidTagError
from indilog.base.ids import (
    EMPTY_TAG,
    LOG_NAME_BYTES_MAX,
    TAG_BYTES_MAX,
    UserTag,
    _ColumnsCache,
    decode_names,
    log_tag,
    majority,
    names_have,
    names_match,
    tag_columns,
    tag_hash,
    unpack_tags,
)


def test_two_logs_never_share_a_tag() -> None:
    assert tag_hash("orders", "new") != tag_hash("mail", "new")


def test_the_boundary_between_log_name_and_tag_changes_the_hash() -> None:
    assert tag_hash("ab", "c") != tag_hash("a", "bc")


def test_the_text_seven_and_the_integer_seven_are_different_tags() -> None:
    assert tag_hash("orders", "7") != tag_hash("orders", 7)


def test_no_tag_hashes_to_the_empty_tag() -> None:
    hashes = [tag_hash("orders", f"t{i}") for i in range(2000)] + [log_tag("orders")]
    assert EMPTY_TAG not in hashes
    assert all(0 < value < 2**64 for value in hashes)


def test_hashes_never_change() -> None:
    # Hashes are on disk: a change of the hash would lose every sub-stream.
    assert log_tag("orders") == 0xC24491F699D72AB8
    assert tag_hash("orders", "customer:7") == 0x2DD0A14C0363B0D
    assert tag_hash("orders", 7) == 0xB32F806540B7E32C


@pytest.mark.parametrize("tag", ["", "a\x1fb", "\ud800", "x" * (TAG_BYTES_MAX + 1)])
def test_text_that_is_no_valid_tag_is_refused(tag: str) -> None:
    with pytest.raises(InvalidTagError):
        tag_hash("orders", tag)


@pytest.mark.parametrize("tag", [0, -1, 2**64, True, 1.5, b"x", None])
def test_a_value_of_another_type_is_no_tag(tag: UserTag) -> None:
    with pytest.raises(InvalidTagError):
        tag_hash("orders", tag)


def test_the_longest_tag_and_the_largest_integer_are_accepted() -> None:
    assert tag_hash("orders", "x" * TAG_BYTES_MAX)
    assert tag_hash("orders", 2**64 - 1)
    assert tag_hash("orders", "é" * (TAG_BYTES_MAX // 2))


def test_the_length_of_a_tag_is_measured_in_bytes() -> None:
    with pytest.raises(InvalidTagError, match=f"{TAG_BYTES_MAX} bytes; this one has"):
        tag_hash("orders", "é" * (TAG_BYTES_MAX // 2 + 1))


@pytest.mark.parametrize("name", ["", "a\x1fb", "\ud800", "x" * (LOG_NAME_BYTES_MAX + 1)])
def test_text_that_is_no_valid_log_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidTagError):
        log_tag(name)


def test_a_records_first_tag_is_the_tag_of_its_log() -> None:
    for tag in ("new", 7):
        alone, _ = tag_columns("orders", (tag,))
        assert list(unpack_tags(alone)) == [log_tag("orders"), tag_hash("orders", tag)]
    packed, _ = tag_columns("orders", ("new", 7))
    hashes = [log_tag("orders"), tag_hash("orders", "new"), tag_hash("orders", 7)]
    assert [*unpack_tags(packed)] == hashes


def test_a_tag_given_twice_counts_once() -> None:
    assert tag_columns("orders", ("a", "b", "a")) == tag_columns("orders", ("a", "b"))


@pytest.mark.parametrize("tag", [True, 1.0, 1 + 0j])
def test_a_value_equal_to_a_cached_tag_is_refused_for_its_type(tag: UserTag) -> None:
    assert tag_columns("orders", (1, "t"))
    for tags in ((tag, "t"), (1, tag)):
        with pytest.raises(InvalidTagError):
            tag_columns("orders", tags)


def test_cached_columns_are_bounded_in_bytes() -> None:
    kept = _ColumnsCache(100_000)
    for n in range(10_000):
        tags = (f"{n}-" + "x" * 200,)
        assert kept.columns("orders", tags) is kept.columns("orders", tags)
    assert 10 < len(kept) < 100_000 / 1_000


def test_columns_in_use_stay_cached_while_others_are_evicted() -> None:
    kept = _ColumnsCache(100_000)
    columns = kept.columns("orders", ("hot",))
    for n in range(1_000):
        kept.columns("orders", (f"cold {n}",))
        assert kept.columns("orders", ("hot",)) is columns


def test_the_names_column_spells_log_and_tags() -> None:
    _, names = tag_columns("orders", ("s7", 7, "i7", "7"))
    assert decode_names(names) == ("orders", ("s7", 7, "i7", "7"))


def test_names_match_the_hashes_that_the_record_was_appended_with() -> None:
    packed, names = tag_columns("orders", ("new", 7))
    hashes = unpack_tags(packed)
    assert all(names_have(names, tag) for tag in hashes)
    others = [
        *unpack_tags(tag_columns("orders", ("7", "old")).tags)[1:],
        *unpack_tags(tag_columns("order", ("new",)).tags),
    ]
    assert not any(names_have(names, tag) for tag in others)


def test_names_match_only_their_own_log_and_tags() -> None:
    _, names = tag_columns("orders", ("new", 7))
    assert names_match(names, "orders", None)
    assert names_match(names, "orders", "new")
    assert names_match(names, "orders", 7)
    assert not names_match(names, "orders", "7")
    assert not names_match(names, "order", None)
    assert not names_match(names, "new", "orders")


@pytest.mark.parametrize(("members", "wanted"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_two_majorities_always_overlap(members: int, wanted: int) -> None:
    assert majority(members) == majority(range(members)) == wanted
    assert 2 * majority(members) > members


def test_the_message_about_an_empty_tag_fits_reads_and_appends() -> None:
    for use in (lambda: tag_columns("orders", ("",)), lambda: tag_hash("orders", "")):
        with pytest.raises(InvalidTagError, match=r"^A tag must not be empty; omit it"):
            use()
