"""The error tree (`indilog.base.errors`)."""

from __future__ import annotations

import builtins
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import indilog
from indilog.base import errors
from indilog.base.errors import (
    FunctionFailedError,
    IndilogError,
    OutcomeUnknownError,
    TooLargeError,
    TrimmedError,
)

ALL: list[Any] = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if kind.__module__ == errors.__name__
]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_in_one_tree(kind: type[Exception]) -> None:
    assert issubclass(kind, IndilogError)


def test_only_operations_without_effect_are_retryable() -> None:
    # An unknown outcome, a crashed worker and a lost record must never be retried blindly.
    assert {kind.__name__ for kind in ALL if kind.retryable} == {
        "NotReadyError",
        "OverloadedError",
        "DiskFullError",
        "SealedError",
        "QuorumUnavailableError",
        "ConflictError",
    }


def test_unknown_outcomes_share_one_error_class() -> None:
    assert {kind.__name__ for kind in ALL if issubclass(kind, OutcomeUnknownError)} == {
        "OutcomeUnknownError",
        "AppendOutcomeUnknownError",
        "CallOutcomeUnknownError",
        "WorkerCrashedError",
    }


def test_a_too_large_error_names_size_and_limit() -> None:
    error = TooLargeError("The record's size in bytes", size=2_000_000, limit=1_048_576)
    assert "2,000,000" in str(error)
    assert "1,048,576" in str(error)
    assert (error.size, error.limit) == (2_000_000, 1_048_576)


def test_a_trimmed_error_names_the_first_readable_seqnum() -> None:
    error = TrimmedError(17)
    assert error.first_seqnum == 17
    assert "17" in str(error)


def test_a_failed_function_keeps_the_name_of_its_exception() -> None:
    assert FunctionFailedError("boom", kind="ValueError").kind == "ValueError"


def test_every_error_that_the_interface_names_can_be_imported_from_the_package() -> None:
    page = (Path(__file__).parents[3] / "docs" / "API.md").read_text()
    named = set(re.findall(r"\b([A-Z]\w+Error)\b", page)) - set(dir(builtins))
    assert len(named) > 10
    assert not {name for name in named if not hasattr(indilog, name)}
