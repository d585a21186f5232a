"""Deployments are followed and loaded by this node, also after any single failure."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from indilog.base.deployed import FunctionSpec, code_digest
from indilog.base.errors import (
    AppendOutcomeUnknownError,
    AppNameTakenError,
    DeployError,
    NotReadyError,
    UnknownFunctionError,
)
from indilog.config import Config, node_config
from indilog.link.worker_messages import Load, Loaded
from indilog.sdk.runs import RUN_CODES
from indilog.testing import MemoryLogs
from indilog_compute.deployments import Deployment
from indilog_compute.invocations.fault_log import FaultLog
from indilog_compute.workers import process
from indilog_compute.workers.applications import Applications
from indilog_compute.workers.call import DeployedApp
from indilog_compute.workers.host import limits_of

pytestmark = pytest.mark.asyncio


def applications_of(logs: MemoryLogs, directory: Path, workers: int = 0) -> Applications:
    node = node_config(
        workers=workers, data_dir=directory, import_retry_s_min=0.001, import_retry_s_max=0.001
    )
    limits = limits_of(Config())
    return Applications(
        node, logs, limits, directory=directory, start=process.start, workers=lambda: ()
    )


@pytest.fixture
def applications(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Applications:
    monkeypatch.setattr("indilog_compute.workers.applications._FOLLOW_AGAIN_S", 0.001)
    return applications_of(MemoryLogs(), tmp_path)


def deployed(number: int, *, problem: str | None = None) -> DeployedApp:
    record = Deployment(name="app", version=number, owner="me", sources={}, functions=())
    made = DeployedApp(number, record, number)
    made.problem = problem
    return made


async def test_a_version_that_was_replaced_while_it_was_tried_is_not_tried_again(
    applications: Applications, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = deployed(1, problem="It does not load.")
    applications._replace(before)
    assert applications._retries.pop_due(float("inf")) is before

    async def replaced(_: Load) -> Loaded:
        applications._replace(deployed(2))
        raise NotReadyError("No process could be started.")

    monkeypatch.setattr(applications._trials, "try_import", replaced)
    await applications._try_again(before)
    assert applications._retries.next_at is None


async def test_an_unexpected_error_ends_no_trials(
    applications: Applications, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = asyncio.Semaphore(0)

    async def fails(_: Load) -> Loaded:
        tries.release()
        raise RuntimeError("a bug")

    monkeypatch.setattr(applications._trials, "try_import", fails)
    applications._replace(deployed(1, problem="It does not load."))
    with capture_logs() as reported:
        applications.follow()
        for _ in range(3):
            await tries.acquire()
        await applications.stop()
    assert {line["event"] for line in reported} == {"app not tried"}


async def test_an_unexpected_error_does_not_end_following(
    applications: Applications, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = asyncio.Semaphore(0)

    async def fails() -> None:
        reads.release()
        raise RuntimeError("a bug")

    monkeypatch.setattr(applications._log, "catch_up", fails)
    applications._behind.set()
    applications._follow_faults = FaultLog(60.0)
    with capture_logs() as reported:
        applications.follow()
        for _ in range(3):
            await reads.acquire()
        await applications.stop()
    assert [line["event"] for line in reported].count("deployments not followed") == 1


async def test_stopping_trials_does_not_wait_for_a_failed_task(
    applications: Applications,
) -> None:
    async def fails() -> None:
        raise RuntimeError("a bug")

    applications._retrying = asyncio.ensure_future(fails())
    await asyncio.sleep(0)
    await applications.stop()
    assert applications._trials._stopping


async def followed(applications: Applications) -> list[int]:
    """Take what the log says now, as following does; return the versions that are deployed."""
    await applications._log.catch_up()
    for placed in list(applications._log.newest.values()):
        if applications._is_behind(placed):
            await applications._take(placed)
    return [app.record.version for app in applications.all()]


async def test_an_undeployed_app_is_gone_on_every_node_until_it_is_deployed_again(
    tmp_path: Path,
) -> None:
    logs = MemoryLogs(clock=lambda: 1_800_000_000.0)
    one, other = (applications_of(logs, tmp_path) for _ in range(2))
    await one._log.append(deployed(1).record)
    assert await followed(other) == [1]
    undeployed = await one.undeploy("app", owner="me")
    assert (undeployed.name, undeployed.version) == ("app", 1)
    generation = other.change_count
    assert await followed(other) == []
    assert other.change_count == generation + 1
    late = applications_of(logs, tmp_path)
    await late.read()
    for node in (one, other, late):
        reported = "App app was undeployed at 2027-01-15T08:00:00.00:00; deploy it again."
        with pytest.raises(UnknownFunctionError, match=reported):
            node.function("app.f")
        already = "App app was already undeployed at 2027-01-15T08:00:00.00:00; its logs stay."
        with pytest.raises(UnknownFunctionError, match=already):
            await node.undeploy("app", owner="me")
    await one._log.append(deployed(1).record)
    assert [await followed(node) for node in (one, other, late)] == [[2]] * 3


async def test_an_app_undeployed_during_its_trial_is_not_loaded(
    applications: Applications,
) -> None:
    await applications._log.append(deployed(1).record)
    await applications._log.catch_up()
    async with applications._loading:
        taking = asyncio.ensure_future(applications._take(applications._log.newest["app"]))
        await asyncio.sleep(0)
        await applications._log.append(deployed(1).record.undeployed())
        await applications._log.catch_up()
    await taking
    assert applications.all() == []


async def test_what_was_recorded_is_not_reported_as_not_done(
    applications: Applications, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log could not be read after the record was appended; it is applied later."""
    append, catch_up = applications._log.append, applications._log.catch_up
    is_away = False

    async def then_away(record: Deployment) -> int:
        nonlocal is_away
        seqnum = await append(record)
        is_away = True
        return seqnum

    async def away(*, fresh: bool = False) -> None:
        if is_away:
            raise NotReadyError("away")
        await catch_up(fresh=fresh)

    with monkeypatch.context() as patched:
        patched.setattr(applications._log, "append", then_away)
        patched.setattr(applications._log, "catch_up", away)
        with pytest.raises(AppendOutcomeUnknownError, match="The deployment of app app is rec"):
            await applications._record(1, Loaded("app", ()), {}, "me")
        is_away = False
        assert await followed(applications) == [1]
        with pytest.raises(AppendOutcomeUnknownError, match="The undeployment of app app is rec"):
            await applications.undeploy("app", owner="me")
    assert await followed(applications) == []


async def test_a_deployment_that_imports_in_a_trial_but_in_no_worker_is_applied_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls get the reason. It was tried again every second, and the old version ran on."""
    applications, unloaded = applications_of(MemoryLogs(), tmp_path, workers=1), list[int]()

    async def imports(load: Load) -> Loaded:
        return Loaded("app", ())

    async def fails(load: Load) -> Loaded:
        raise DeployError("app.py, line 3: ValueError: it was imported before.")

    monkeypatch.setattr(applications._trials, "try_import", imports)
    monkeypatch.setattr(applications, "_load_everywhere", fails)
    monkeypatch.setattr(applications, "_unload_number", unloaded.append)
    await applications._log.append(deployed(1).record)
    assert await followed(applications) == [1]
    [app] = applications.all()
    assert app.problem is not None
    assert "line 3: ValueError" in app.problem
    assert unloaded == [app.number]
    assert applications._retries.next_at is not None


async def test_an_app_of_another_owner_is_not_undeployed(applications: Applications) -> None:
    await applications._log.append(deployed(1).record)
    with pytest.raises(AppNameTakenError, match="was deployed by me; undeploy it as that owner"):
        await applications.undeploy("app", owner="eve")
    with pytest.raises(UnknownFunctionError, match="No app 'nope' is deployed"):
        await applications.undeploy("nope", owner="me")
    assert await followed(applications) == [1]


async def test_an_undeployed_app_is_unloaded_after_its_last_call(
    applications: Applications, monkeypatch: pytest.MonkeyPatch
) -> None:
    unloaded: list[DeployedApp] = []
    monkeypatch.setattr(applications, "unload", unloaded.append)
    for running, expected in [(0, 1), (1, 1)]:
        await applications._log.append(deployed(1).record)
        await followed(applications)
        [app] = applications.all()
        app.running = running
        await applications.undeploy("app", owner="me")
        assert (len(unloaded), app.is_retired) == (expected, True)


async def test_a_deployment_undeployed_at_the_same_time_fails(
    applications: Applications, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = applications._log.append

    async def raced(record: Deployment) -> int:
        seqnum = await append(record)
        await append(record.undeployed())
        return seqnum

    await append(deployed(1).record)
    assert await followed(applications) == [1]
    monkeypatch.setattr(applications._log, "append", raced)
    with pytest.raises(
        DeployError, match="app was undeployed by another request at the same time; deploy it again"
    ):
        await applications._record(2, Loaded("app", ()), {}, "me")
    assert applications._behind.is_set()
    assert await followed(applications) == []


def version_of(number: int, text: str, keeps: tuple[int, ...] = ()) -> Deployment:
    return Deployment(
        name="app",
        version=number,
        owner="me",
        sources={"a.py": text},
        functions=(),
        operations=(FunctionSpec(RUN_CODES, "", {}, {}),),
        keeps=keeps,
    )


async def kept(applications: Applications) -> list[tuple[int, bool]]:
    """Follow the log; return the version of each kept deployment, and whether it is retired."""
    await followed(applications)
    found = applications._kept.get("app", [])
    return [(one.record.version, one.is_kept and one.is_retired) for one in found]


async def test_each_node_keeps_what_the_newest_deployment_keeps(tmp_path: Path) -> None:
    """It may have followed every deployment, only the newest one, or start later."""
    logs = MemoryLogs()
    one, other, late = (applications_of(logs, tmp_path) for _ in range(3))
    keeps: tuple[int, ...] = ()
    for number, text in enumerate("xyz", 1):
        keeps = (await one._log.append(version_of(number, text, keeps)), *keeps)
        await kept(one)
        await one._log.collect()
    assert await kept(one) == await kept(other) == [(2, True), (1, True)]
    await late.read()
    assert await kept(late) == [(2, True), (1, True)]
    await one._log.append(version_of(4, "x", keeps[1:]))
    assert await kept(one) == await kept(other) == await kept(late) == [(2, True)]


async def test_a_deployment_keeps_the_newest_code_and_other_code_in_use(tmp_path: Path) -> None:
    applications = applications_of(MemoryLogs(), tmp_path)
    places: tuple[int, ...] = ()
    for number, text in enumerate("vwxyz", 1):
        places = (await applications._log.append(version_of(number, text, places)), *places)
        await followed(applications)
    codes = [code_digest({"a.py": text}) for text in "vwxyz"]
    assert applications._to_keep("app", "new", None) == places[:3]
    assert applications._to_keep("app", "new", frozenset(codes[1:2])) == (places[0], places[3])
    assert applications._to_keep("app", "new", frozenset()) == places[:1]
    assert applications._to_keep("app", codes[4], frozenset(codes[3:])) == (places[1],)
    assert applications._to_keep("other", "new", None) == ()


async def test_an_application_without_runs_keeps_no_code(applications: Applications) -> None:
    plain = msgspec.structs.replace(version_of(1, "x"), operations=())
    await applications._log.append(plain)
    await followed(applications)
    assert await applications._needed("app") == frozenset()
    assert applications._to_keep("app", "new", frozenset()) == ()
