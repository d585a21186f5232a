"""Test cases that repeat another case with another process, layout or seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet


def repeated(value: object, name: str | None = None) -> ParameterSet:
    """Return a case for `parametrize` that runs only with `pytest --all`."""
    return pytest.param(value, id=name, marks=pytest.mark.repeated)
