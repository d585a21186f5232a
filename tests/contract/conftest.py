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
EVERYWHERE = ("test_log", "test_conditional_appends")
"""Modules whose tests run on all kinds."""
OF_LOGS = (*EVERYWHERE, "test_trim", "test_sessions", "test_live")
"""Modules whose tests run on variants of kinds, too."""
ON_FEWER_KINDS = ("test_reads_agree_with_a_naive_list_at_every_bound",)
"""Tests of modules `EVERYWHERE` that read hundreds of times."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark as `repeated` what a library does on a variant of a kind, and what costs much there."""
    chosen = item.callspec.params.get("kind") if hasattr(item, "callspec") else None
    if not isinstance(chosen, Kind):
        return
    module, name = item.path.stem, item.name.partition("[")[0]
    everywhere = module in EVERYWHERE and name not in ON_FEWER_KINDS
    if (chosen.is_costly and not everywhere) or (chosen.is_variant and module not in OF_LOGS):
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
