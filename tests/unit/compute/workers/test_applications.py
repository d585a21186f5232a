"""What is deployed here goes on being followed and tried, whatever happens once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from compute.deployments import Deployment
from compute.invocations.notices import Notices
from compute.workers.applications import Applications
from compute.workers.call import Deployed
from compute.workers.host import limits_of
from indilog.config import Config, NodeConfig
from indilog.errors import NotReadyError
from indilog.testing import MemoryLogs
from indilog.worker_messages import Load, Loaded

pytestmark = pytest.mark.asyncio


@pytest.fixture
def applications(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Applications:
    monkeypatch.setattr("compute.workers.applications._FOLLOW_AGAIN_S", 0.001)
    node = NodeConfig(
        workers=0, data_dir=tmp_path, import_retry_s_min=0.001, import_retry_s_max=0.001
    )
    return Applications(
        node, MemoryLogs(), limits_of(Config()), directory=tmp_path, workers=lambda: ()
    )


def deployed(number: int, *, problem: str | None = None) -> Deployed:
    record = Deployment(name="app", version=number, owner="me", sources={}, functions=())
    made = Deployed(number, record, number)
    made.problem = problem
    return made


async def test_a_version_that_was_replaced_while_it_was_tried_is_not_tried_again(
    applications: Applications, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = deployed(1, problem="It does not load.")
    applications._replace(before)
    assert applications._retries.taken(float("inf")) is before

    async def replaced(_: Load) -> Loaded:
        applications._replace(deployed(2))
        raise NotReadyError("No process could be started.")

    monkeypatch.setattr(applications._trials, "imported", replaced)
    await applications._tried_again(before)
    assert applications._retries.next_at is None


async def test_an_error_that_nobody_foresaw_ends_no_trials(
    applications: Applications, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = asyncio.Semaphore(0)

    async def fails(_: Load) -> Loaded:
        tries.release()
        raise RuntimeError("a bug")

    monkeypatch.setattr(applications._trials, "imported", fails)
    applications._replace(deployed(1, problem="It does not load."))
    with capture_logs() as told:
        applications.follow()
        for _ in range(3):
            await tries.acquire()
        await applications.stop()
    assert {line["event"] for line in told} == {"app not tried"}


async def test_an_error_that_nobody_foresaw_does_not_end_following(
    applications: Applications, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = asyncio.Semaphore(0)

    async def fails() -> None:
        reads.release()
        raise RuntimeError("a bug")

    monkeypatch.setattr(applications._log, "catch_up", fails)
    applications._behind.set()
    applications._notices = Notices(60.0)
    with capture_logs() as told:
        applications.follow()
        for _ in range(3):
            await reads.acquire()
        await applications.stop()
    assert [line["event"] for line in told].count("deployments not followed") == 1


async def test_the_end_of_what_is_tried_waits_for_no_task_that_failed(
    applications: Applications,
) -> None:
    async def fails() -> None:
        raise RuntimeError("a bug")

    applications._retrying = asyncio.ensure_future(fails())
    await asyncio.sleep(0)
    await applications.stop()
    assert applications._trials._stopping
