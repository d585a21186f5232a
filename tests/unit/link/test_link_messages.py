"""Errors as messages: they arrive with their class and attributes, or as the nearest known
class.
"""

from __future__ import annotations

import pytest

from indilog.base import errors
from indilog.base.errors import (
    ConditionFailedError,
    ConflictError,
    FunctionFailedError,
    IndilogError,
    InvalidArgumentsError,
    TooLargeError,
    TrimmedError,
)
from indilog.link.frames import FrameReader, write_frame
from indilog.link.link_messages import LinkLostError, error_from, failed


def carried(error: Exception) -> Exception:
    """Send an error over a stream and return the received error."""
    stream = bytearray()
    write_frame(stream, 1, failed(error, 7))
    [frame] = FrameReader(4096).frames(bytes(stream))
    assert frame.message == failed(error, 7)
    return error_from(failed(error, 7))


@pytest.mark.parametrize(
    "kind",
    [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, IndilogError)
        if value not in (ConditionFailedError, TooLargeError, TrimmedError)
    ],
)
def test_every_error_of_the_tree_keeps_its_class(kind: type[IndilogError]) -> None:
    arrived = carried(kind("One sentence."))
    assert type(arrived) is kind
    assert str(arrived) == "One sentence."


def test_error_attributes_arrive() -> None:
    failed_append = carried(ConditionFailedError("paid", 7))
    assert isinstance(failed_append, ConditionFailedError)
    assert failed_append.last_seqnum == 7
    large = carried(TooLargeError("The record's size in bytes", size=9, limit=8))
    assert isinstance(large, TooLargeError)
    assert (large.size, large.limit) == (9, 8)
    assert str(large) == "The record's size in bytes is 9, the limit is 8; nothing was done."
    trimmed = carried(TrimmedError(40))
    assert isinstance(trimmed, TrimmedError)
    assert trimmed.first_seqnum == 40
    misfit = carried(InvalidArgumentsError("No.", [{"field": "n", "problem": "is missing"}]))
    assert isinstance(misfit, InvalidArgumentsError)
    assert misfit.errors == [{"field": "n", "problem": "is missing"}]
    raised = carried(FunctionFailedError("No.", kind="KeyError"))
    assert isinstance(raised, FunctionFailedError)
    assert raised.kind == "KeyError"


def test_a_librarys_error_arrives_as_the_nearest_of_the_tree() -> None:
    class StoreConflictError(ConflictError):
        pass

    arrived = carried(StoreConflictError("Read again."))
    assert type(arrived) is ConflictError
    assert arrived.retryable


def test_mistakes_in_arguments_arrive_as_pythons_own_errors() -> None:
    assert type(carried(ValueError("bound is negative"))) is ValueError
    assert type(carried(TypeError("data must be bytes"))) is TypeError
    assert type(carried(KeyError("x"))) is IndilogError


def test_a_lost_link_is_a_retryable_error() -> None:
    assert LinkLostError("Gone.").retryable
