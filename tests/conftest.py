"""Configuration of all tests: hypothesis profiles and the number of seeds.

`--all` also runs the tests marked `repeated`: they repeat others with another process, layout or
seed. The mark of a whole test names the file or folder of these others.

`HYPOTHESIS_PROFILE` chooses a profile: `dev` looks for new examples on every run, `ci` (what
`./test` uses) always tries the same ones, fewer without `--all`, and `nightly` tries many.
`--seeds N` gives the tests marked `heavy` more seeds than their own moderate number. `--messages N`
gives those of queues more messages, and `--runs N` that of workflows more runs. `--transactions N`
gives that of serializability more transactions.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.process_state import process_state
from tests.support.dealing import dealt
from tests.support.zookeeper_server import ZooKeeperServer, zookeeper_running

# pyarrow imports it with the first array that it converts, and its `six` adds a finder of imports.
importlib.import_module("dateutil.tz")

# A shared machine is slow now and then: no test asserts a time, hypothesis included.
settings.register_profile(
    "dev", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("all", settings.get_profile("dev"), derandomize=True, database=None)
settings.register_profile("ci", settings.get_profile("all"), max_examples=20)
settings.register_profile("nightly", settings.get_profile("dev"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--all`, `--seeds`, `--kills`, `--transactions`, `--messages` and `--runs`."""
    parser.addoption("--all", action="store_true", help="also run the tests marked `repeated`")
    parser.addoption(
        "--seeds", type=int, default=None, help="how many seeds each test marked `heavy` runs"
    )
    parser.addoption(
        "--kills", type=int, default=None, help="how often the crash trials kill the platform"
    )
    parser.addoption(
        "--transactions", type=int, default=None, help="how many transactions of BokiStore run"
    )
    parser.addoption(
        "--messages", type=int, default=None, help="how many messages the tests of queues move"
    )
    parser.addoption(
        "--runs", type=int, default=None, help="how many workflows run while processes are killed"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Try more of the same examples with `--all`, before a test is imported."""
    if config.getoption("--all") and os.environ.get("HYPOTHESIS_PROFILE") == "ci":
        settings.load_profile("all")


PROCESSES_S_MAX = 600
"""Seconds for a test with real processes that says nothing else: a busy machine is slow."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked `repeated`, unless `--all` is given; begin with long ones."""
    for item in items:
        if item.get_closest_marker("cluster") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(PROCESSES_S_MAX))
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("repeated")]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker("repeated")]
    # A process started by xdist knows how many there are.
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = dealt(items, processes)


@pytest.fixture(autouse=True)
def process_as_it_was() -> Iterator[None]:
    """Let no test meet what an earlier one changed for the whole process; see `process_state`."""
    before = process_state()
    yield
    forgotten = before.restore()
    assert not forgotten, f"the test changed {', '.join(forgotten)} and did not put it back"


@pytest.fixture(scope="session")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperServer]:
    """Run one ZooKeeper for all tests of this process that want it."""
    with zookeeper_running(tmp_path_factory.mktemp("zookeeper")) as server:
        yield server


@pytest.fixture(scope="session")
def kills_wanted(request: pytest.FixtureRequest) -> int | None:
    """Return what `--kills` says; None: the trial's own number."""
    wanted = request.config.getoption("--kills")
    assert wanted is None or isinstance(wanted, int)
    return wanted


@pytest.fixture(scope="session")
def runs_wanted(request: pytest.FixtureRequest) -> int | None:
    """Return what `--runs` says; None: the test's own number."""
    wanted = request.config.getoption("--runs")
    assert wanted is None or isinstance(wanted, int)
    return wanted


@pytest.fixture(scope="session")
def seeds_wanted(request: pytest.FixtureRequest) -> int | None:
    """Return what `--seeds` says; None: every heavy test's own number."""
    wanted = request.config.getoption("--seeds")
    assert wanted is None or isinstance(wanted, int)
    return wanted


@pytest.fixture(scope="session")
def transactions_wanted(request: pytest.FixtureRequest) -> int | None:
    """Return what `--transactions` says; None: every test's own number."""
    wanted = request.config.getoption("--transactions")
    assert wanted is None or isinstance(wanted, int)
    return wanted


@pytest.fixture(scope="session")
def messages_wanted(request: pytest.FixtureRequest) -> int | None:
    """Return what `--messages` says; None: every test's own number."""
    wanted = request.config.getoption("--messages")
    assert wanted is None or isinstance(wanted, int)
    return wanted
