"""Deployments as records of the log: the newest of each name wins, whatever stands between."""

from __future__ import annotations

import pytest

from compute.deployments import APPS_LOG, Deployment, DeploymentLog, check_log_name
from indilog.config import ClusterConfig
from indilog.deployed import FunctionSpec
from indilog.errors import DeployError, InvalidTagError
from indilog.testing import MemoryLogs

pytestmark = pytest.mark.asyncio
SPEC = FunctionSpec("f", "Words.", {"type": "object"}, {"type": "integer"}, timeout_s=2.0)


def deployment(name: str, version: int, text: str = "x") -> Deployment:
    return Deployment(
        name=name, version=version, owner="me", sources={"a.py": text}, functions=(SPEC,)
    )


async def test_the_newest_deployment_of_each_name_comes_back_whole() -> None:
    logs = MemoryLogs()
    written = DeploymentLog(logs)
    for one in (deployment("a", 1), deployment("b", 1), deployment("a", 2, "y")):
        await written.append(one)
    assert await DeploymentLog(logs).newest() == {
        "a": deployment("a", 2, "y"),
        "b": deployment("b", 1),
    }


async def test_a_record_that_is_not_understood_hides_no_other() -> None:
    logs = MemoryLogs()
    await DeploymentLog(logs).append(deployment("a", 1))
    await logs.log(APPS_LOG).append(b'{"of": "a later version"}')
    await DeploymentLog(logs).append(deployment("b", 1))
    assert sorted(await DeploymentLog(logs).newest()) == ["a", "b"]


async def test_sources_over_the_limit_of_a_record_say_so() -> None:
    logs = MemoryLogs(ClusterConfig(record_bytes_max=1000))
    with pytest.raises(DeployError, match=r"the limit is 1,000; leave data files out\."):
        await DeploymentLog(logs).append(deployment("a", 1, "x" * 2000))
    assert await DeploymentLog(logs).newest() == {}


async def test_many_deployments_are_read_page_by_page() -> None:
    logs = MemoryLogs(page_bytes_max=300)
    for version in range(20):
        await DeploymentLog(logs).append(deployment(f"app{version % 3}", version))
    newest = await DeploymentLog(logs).newest()
    assert {name: d.version for name, d in newest.items()} == {"app0": 18, "app1": 19, "app2": 17}


async def test_the_platforms_own_names_are_not_a_users() -> None:
    assert check_log_name("orders") == "orders"
    with pytest.raises(InvalidTagError):
        check_log_name("$apps")
