"""Deployments as records of the log: the newest deployment of each name wins."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from indilog.base.deployed import FunctionSpec, ScheduleSpec
from indilog.base.errors import DataLossError, DeployError, NotReadyError
from indilog.base.log import Record
from indilog.config import ClusterConfig
from indilog.testing import MemoryLogs
from indilog_compute import deployments
from indilog_compute.deployments import APPS_LOG, Deployment, DeploymentLog
from indilog_compute.workers.refusals import unknown_app
from tests.support.damaged_log import DamagedLogs

pytestmark = pytest.mark.asyncio
SPEC = FunctionSpec("f", "Words.", {"type": "object"}, {"type": "integer"}, timeout_s=2.0)


def deployment(name: str, version: int, text: str = "x", owner: str = "me") -> Deployment:
    return Deployment(
        name=name, version=version, owner=owner, sources={"a.py": text}, functions=(SPEC,)
    )


async def newest(logs: MemoryLogs) -> dict[str, Deployment]:
    """The deployments that a starting compute node reads."""
    read = DeploymentLog(logs)
    await read.catch_up()
    return {
        name: msgspec.structs.replace(placed.deployment, follows=None, read_below=0, since=())
        for name, placed in read.newest.items()
    }


async def test_the_newest_deployment_of_each_name_is_read_whole() -> None:
    logs = MemoryLogs()
    written = DeploymentLog(logs)
    for one in (deployment("a", 1), deployment("b", 1), deployment("a", 2, "y")):
        await written.append(one)
    assert await newest(logs) == {"a": deployment("a", 2, "y"), "b": deployment("b", 1)}


async def test_an_unknown_record_hides_no_other() -> None:
    logs = MemoryLogs()
    await DeploymentLog(logs).append(deployment("a", 1))
    await logs.log(APPS_LOG).append(b'{"of": "a later version"}')
    await DeploymentLog(logs).append(deployment("b", 1))
    assert sorted(await newest(logs)) == ["a", "b"]


async def test_sources_over_the_limit_of_a_record_are_refused() -> None:
    logs = MemoryLogs(ClusterConfig(record_bytes_max=1000))
    with pytest.raises(DeployError, match=r"the limit is 1,000; leave data files out\."):
        await DeploymentLog(logs).append(deployment("a", 1, "x" * 2000))
    assert await newest(logs) == {}


async def test_many_deployments_are_read_page_by_page() -> None:
    logs = MemoryLogs(page_bytes_max=300)
    for version in range(20):
        await DeploymentLog(logs).append(deployment(f"app{version % 3}", version))
    found = await newest(logs)
    assert {name: d.version for name, d in found.items()} == {"app0": 18, "app1": 19, "app2": 17}


async def test_concurrent_deployments_give_all_nodes_the_same_result() -> None:
    """Two nodes each recorded a first version; a third one lost the race for another's name."""
    logs = MemoryLogs()
    one, two = DeploymentLog(logs), DeploymentLog(logs)
    await one.append(deployment("a", 1, "one"))
    await one.catch_up()
    await two.append(deployment("a", 1, "two"))
    await two.append(deployment("a", 2, "eve's", owner="eve"))
    for read in (one, two, DeploymentLog(logs)):
        await read.catch_up()
        placed = read.newest["a"]
        assert placed[:2] == (1, deployment("a", 2, "two"))


async def test_an_undeployed_application_keeps_its_version_and_frees_its_name() -> None:
    """Every reader knows the time of the undeployment and lets any owner deploy after it."""
    now = 100.0
    logs = MemoryLogs(clock=lambda: now)
    written = DeploymentLog(logs)
    for one in (deployment("a", 1), deployment("a", 2)):
        await written.append(one)
    now = 200.0
    await written.append(deployment("a", 2).undeployed())
    for read in (written, DeploymentLog(logs)):
        await read.catch_up()
        gone = read.newest["a"]
        assert (gone.seqnum, gone.time, gone.deployment.version) == (2, 200.0, 2)
        assert gone.deployment.is_undeployed
        assert not gone.deployment.sources
    await written.append(deployment("a", 1, "eve's", owner="eve"))
    assert await newest(logs) == {"a": deployment("a", 3, "eve's", owner="eve")}


async def test_an_undeployment_by_another_owner_or_of_an_undeployed_app_has_no_effect() -> None:
    logs = MemoryLogs()
    written = DeploymentLog(logs)
    first = deployment("a", 1)
    await written.append(first.undeployed())
    assert await newest(logs) == {}, "there was none"
    await written.append(first)
    await written.append(deployment("a", 1, owner="eve").undeployed())
    assert await newest(logs) == {"a": first}
    await written.append(first.undeployed())
    await written.append(first.undeployed())
    await written.catch_up()
    assert written.newest["a"].seqnum == 3, "the first one of two"


async def test_a_schedule_of_an_undeployed_app_starts_over() -> None:
    now = 0.0
    logs = MemoryLogs(clock=lambda: now)
    hourly = ScheduleSpec("f", "0 * * * *")
    with_it = msgspec.structs.replace(deployment("a", 1), schedules=(hourly,))
    for one in (with_it, with_it.undeployed(), with_it):
        now += 100.0
        await DeploymentLog(logs).append(one)
    read = DeploymentLog(logs)
    await read.catch_up()
    assert read.newest["a"].since == {hourly: 300.0}


async def test_waiting_for_more_deployments_ends_when_one_is_appended() -> None:
    logs = MemoryLogs()
    read = DeploymentLog(logs)
    more = asyncio.ensure_future(read.wait_for_more(60))
    await asyncio.sleep(0)
    await DeploymentLog(logs).append(deployment("a", 1))
    await more
    await read.catch_up()
    assert read.newest["a"].seqnum == 0


async def test_a_schedule_dates_from_the_first_of_consecutive_deployments_that_have_it() -> None:
    """Another `catch_up` keeps the date; a schedule that was removed and added again gets a new
    date.
    """
    now = 0.0
    logs = MemoryLogs(clock=lambda: now)
    hourly, daily = ScheduleSpec("f", "0 * * * *"), ScheduleSpec("f", "0 0 * * *")
    every = ScheduleSpec("f", "0 * * * *", catch_up="all")
    reported = []
    for schedules in [(hourly,), (every, daily), (daily,), (hourly, daily)]:
        now += 100.0
        with_them = msgspec.structs.replace(deployment("a", int(now)), schedules=schedules)
        await DeploymentLog(logs).append(with_them)
        read = DeploymentLog(logs)
        await read.catch_up()
        reported.append(dict(read.newest["a"].since))
    assert reported == [
        {hourly: 100.0},
        {every: 100.0, daily: 200.0},
        {daily: 200.0},
        {hourly: 400.0, daily: 200.0},
    ]


# --- garbage collection


async def left(logs: MemoryLogs) -> list[Record]:
    """Return the records that a start reads."""
    return await logs.log(APPS_LOG).read_range(limit=10_000)


async def test_a_thousand_deployments_leave_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """That record carries the version, and the time since when each schedule exists."""
    now = 0.0
    logs = MemoryLogs(clock=lambda: now)
    written = DeploymentLog(logs)
    hourly, daily = ScheduleSpec("f", "0 * * * *"), ScheduleSpec("f", "0 0 * * *")
    await written.append(deployment("other", 1))
    for number in range(1_000):
        now += 1.0
        both = (hourly, daily) if number >= 500 else (hourly,)
        one = msgspec.structs.replace(deployment("a", 1, "x" * 1_000), schedules=both)
        await written.append(one)
        await written.catch_up()
        await written.collect()
    records = await left(logs)
    assert len(records) == 2
    assert sum(len(record.data) for record in records) < 5_000
    read = DeploymentLog(logs)
    await read.catch_up()
    assert sorted(read.newest) == ["a", "other"]
    assert read.newest["a"].deployment.version == 1_000
    assert read.newest["a"].since == {hourly: 1.0, daily: 501.0}
    again = DeploymentLog(logs)
    await again.catch_up()
    trims: list[object] = []
    monkeypatch.setattr(MemoryLogs, "trim", lambda *given: trims.append(given))
    await again.collect()
    assert trims == [], "there is nothing left to trim"


async def test_an_undeployment_survives_the_trim_of_its_deployments() -> None:
    logs = MemoryLogs()
    written = DeploymentLog(logs)
    for one in (deployment("a", 1), deployment("a", 2), deployment("a", 2).undeployed()):
        await written.append(one)
        await written.catch_up()
    await written.collect()
    assert len(await left(logs)) == 1
    read = DeploymentLog(logs)
    await read.catch_up()
    assert read.newest["a"].deployment.is_undeployed
    await read.append(deployment("a", 1, "new", owner="eve"))
    assert await newest(logs) == {"a": deployment("a", 3, "new", owner="eve")}


async def test_the_last_undeployed_applications_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others are forgotten, as if they had never been deployed."""
    monkeypatch.setattr(deployments, "UNDEPLOYED_KEPT", 2)
    logs = MemoryLogs()
    written = DeploymentLog(logs)
    await written.append(deployment("stays", 1))
    for name in "abcde":
        for one in (deployment(name, 1), deployment(name, 1).undeployed()):
            await written.append(one)
            await written.catch_up()
    await written.collect()
    assert sorted(written.newest) == ["d", "e", "stays"]
    assert sorted(await newest(logs)) == ["d", "e", "stays"]
    assert len(await left(logs)) == 3
    await written.append(deployment("a", 1))
    assert (await newest(logs))["a"] == deployment("a", 1)


async def test_nodes_that_forgot_an_application_and_other_nodes_assign_one_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A deployment has the position up to which its writer had read. Earlier ones do not count."""
    monkeypatch.setattr(deployments, "UNDEPLOYED_KEPT", 1)
    logs = MemoryLogs()
    collecting, other = DeploymentLog(logs), DeploymentLog(logs)
    for one in (deployment("a", 7), deployment("a", 7).undeployed()):
        await collecting.append(one)
    for one in (deployment("b", 1), deployment("b", 1).undeployed()):
        await collecting.append(one)
        await collecting.catch_up()
    await other.catch_up()
    await collecting.collect()
    assert "a" not in collecting.newest
    assert other.newest["a"].deployment.version == 7
    await collecting.append(deployment("a", 1))
    for read in (collecting, other, DeploymentLog(logs)):
        await read.catch_up()
        assert read.newest["a"].deployment.version == 1
    await other.append(deployment("b", 1))
    for read in (collecting, other, DeploymentLog(logs)):
        await read.catch_up()
        assert read.newest["b"].deployment.version == 2


@pytest.mark.parametrize("meanwhile", ["deployed", "lost"])
async def test_deployments_read_while_a_trim_is_awaited_are_kept(
    monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """The node keeps reading while it collects: an application may be deployed again, or lost."""
    monkeypatch.setattr(deployments, "UNDEPLOYED_KEPT", 0)
    logs = DamagedLogs()
    logs.tags = ("a",)
    node = DeploymentLog(logs)
    for one in (deployment("a", 1), deployment("a", 1).undeployed()):
        await node.append(one)
        await node.catch_up()
    trim = node._log.trim

    async def read_on(until: int, *, tag: str | None = None) -> None:
        await trim(until, tag=tag)
        seqnum = await DeploymentLog(logs).append(deployment("a", 1, owner="eve"))
        logs.lost = {seqnum} if meanwhile == "lost" else set()
        await node.catch_up()

    node._superseded.clear()
    monkeypatch.setattr(node._log, "trim", read_on)
    await node.collect()
    assert ("a" in node.newest, "a" in node.lost) == (meanwhile == "deployed", meanwhile == "lost")
    if meanwhile == "deployed":
        assert not node.newest["a"].deployment.is_undeployed
        assert node._superseded == {"a"}, "the superseded deployments are trimmed by the next call"


async def test_a_redeployment_while_earlier_records_are_trimmed_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logs = MemoryLogs()
    node = DeploymentLog(logs)
    for _ in range(2):
        await node.append(deployment("a", 1))
        await node.catch_up()
    trim = node._log.trim

    async def read_on(until: int, *, tag: str | None = None) -> None:
        await trim(until, tag=tag)
        await node.append(deployment("a", 1))
        await node.catch_up()

    monkeypatch.setattr(node._log, "trim", read_on)
    await node.collect()
    monkeypatch.setattr(node._log, "trim", trim)
    await node.collect()
    assert len(await left(logs)) == 1


async def test_nothing_is_trimmed_after_concurrent_deployments() -> None:
    """Neither of two concurrent deployments carries the state of the other; the next one carries
    both.
    """
    now = 0.0
    logs = MemoryLogs(clock=lambda: now)
    hourly = ScheduleSpec("f", "0 * * * *")
    one, two = DeploymentLog(logs), DeploymentLog(logs)
    for node in (one, two, two):
        now += 100.0
        await node.append(msgspec.structs.replace(deployment("a", 1), schedules=(hourly,)))
    await one.catch_up()
    await one.collect()
    assert len(await left(logs)) == 3
    await one.append(msgspec.structs.replace(deployment("a", 1), schedules=(hourly,)))
    await one.catch_up()
    await one.collect()
    assert len(await left(logs)) == 1
    read = DeploymentLog(logs)
    await read.catch_up()
    assert (read.newest["a"].deployment.version, read.newest["a"].since) == (4, {hourly: 100.0})


async def test_a_node_that_follows_later_uses_the_state_that_a_deployment_carries() -> None:
    """The one that it lacks, without the schedule, is trimmed."""
    now = 0.0
    logs = MemoryLogs(clock=lambda: now)
    hourly = ScheduleSpec("f", "0 * * * *")
    one, late = DeploymentLog(logs), DeploymentLog(logs)
    for schedules in ((hourly,), (), (hourly,)):
        now += 100.0
        await one.append(msgspec.structs.replace(deployment("a", 1), schedules=schedules))
        await one.catch_up()
        if now == 100.0:
            await late.catch_up()
    await one.collect()
    await late.catch_up()
    assert (late.newest["a"].deployment.version, late.newest["a"].since) == (3, {hourly: 300.0})


async def test_an_application_whose_newest_deployment_is_lost_is_reported_by_name() -> None:
    """An earlier version is not used as the newest; deploying again repairs it."""
    logs = DamagedLogs()
    written = DeploymentLog(logs)
    for one in (deployment("a", 1), deployment("b", 1), deployment("a", 2, "y")):
        logs.lost = {await written.append(one)}
    logs.tags = ("a",)
    read = DeploymentLog(logs)
    await read.catch_up()
    assert sorted(read.newest) == ["b"]
    assert str(read.lost["a"]).startswith("The newest deployment of app a is lost by damage")
    with pytest.raises(DataLossError, match="deployment of app a is lost"):
        read.placed("a")
    with pytest.raises(NotReadyError, match="App z was undeployed and forgotten meanwhile"):
        read.placed("z")
    await written.append(deployment("a", 3))
    await read.wait_for_more(0)
    await read.catch_up()
    assert (sorted(read.newest), read.lost) == (["a", "b"], {})


async def test_a_lost_deployment_of_unknown_name_stops_no_other() -> None:
    logs = DamagedLogs()
    written = DeploymentLog(logs)
    for one in (deployment("a", 1), deployment("b", 1), deployment("c", 1)):
        if (seqnum := await written.append(one)) == 1:
            logs.lost = {seqnum}
    read = DeploymentLog(logs)
    await read.catch_up()
    assert sorted(read.newest) == ["a", "c"]
    assert "at seqnums [1, 2) may be lost" in read.losses.sentence
    missing = unknown_app("b", {}, read)
    assert "or its deployment is lost" in str(missing)
