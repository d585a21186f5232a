"""Fixtures: the directory of a test's journals, and the journals that it opened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from indilog.runtime.journal.journal import Journal


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "data" / "journal"


@pytest.fixture
def opened() -> Iterator[list[Journal]]:
    """Every journal that a test opened (`journals.started`); closed at its end."""
    journals: list[Journal] = []
    yield journals
    for journal in journals:
        journal.close()
