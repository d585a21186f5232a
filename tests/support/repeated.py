"""Test cases that repeat another case with another process, layout or seed.

A whole test that repeats others is marked with the file or folder of those others:
`@pytest.mark.repeated("tests/unit/ordering")`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _pytest.mark import ParameterSet


def repeated(value: object, name: str | None = None) -> ParameterSet:
    """Return a case for `parametrize` that runs only with `pytest --all`."""
    return pytest.param(value, id=name, marks=pytest.mark.repeated)


def first_of(values: Iterable[object], count: int) -> list[object]:
    """Return cases of which only the first `count` run without `pytest --all`."""
    return [value if at < count else repeated(value) for at, value in enumerate(values)]
