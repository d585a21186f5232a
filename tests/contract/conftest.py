"""Fixtures of the contract suite: one source of logs of each kind, and a fresh log in it."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from indilog.base.log import Log, LogSource, Session
from tests.contract.kinds import KINDS, Kind

_fresh = itertools.count()
OF_LOGS = ("test_log", "test_trim", "test_sessions", "test_live", "test_conditional_appends")
"""Modules whose tests run on variants of kinds, too."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what a library does on a variant of a kind as `repeated`."""
    chosen = item.callspec.params.get("kind") if hasattr(item, "callspec") else None
    if isinstance(chosen, Kind) and chosen.is_variant and item.path.stem not in OF_LOGS:
        item.add_marker(pytest.mark.repeated)


@pytest.fixture(params=[pytest.param(k, id=name, marks=k.marks) for name, k in KINDS.items()])
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen = request.param
    assert isinstance(chosen, Kind)
    if chosen.is_busy and request.node.get_closest_marker("exact_seqnums") is not None:
        pytest.skip("the platform appends records of its own")
    return chosen


@pytest_asyncio.fixture
async def logs(kind: Kind, tmp_path: Path) -> AsyncIterator[LogSource]:
    async with kind.open(tmp_path) as source:
        yield source


@pytest.fixture
def name(tmp_path: Path) -> str:
    """A name that no other test uses, also where tests share a running platform."""
    return f"{tmp_path.parent.parent.name}/{tmp_path.name}-{next(_fresh)}"[-100:]


@pytest.fixture
def log(logs: LogSource, name: str) -> Log:
    return logs.log(name, Session())


@pytest.fixture
def session_of(logs: LogSource, name: str) -> Callable[[], Log]:
    """Return the same log in a session of its own, like that of another client."""
    return lambda: logs.log(name, Session())
