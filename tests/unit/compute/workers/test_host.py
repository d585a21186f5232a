"""What the function host tells the parts of it of each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from compute.deployments import Deployment
from compute.workers.call import Deployed
from compute.workers.host import FunctionHost
from indilog.config import Config, NodeConfig
from indilog.deployed import ScheduleSpec
from indilog.errors import DeployError, UnknownFunctionError
from indilog.testing import MemoryLogs

pytestmark = pytest.mark.asyncio


async def test_schedules_of_an_application_that_does_not_load_wait_until_it_does(
    tmp_path: Path,
) -> None:
    """Otherwise each due time would be one more call that stays open."""
    host = FunctionHost(Config(node=NodeConfig(workers=0, data_dir=tmp_path)), MemoryLogs())
    spec = ScheduleSpec("f", "* * * * *")
    record = Deployment(
        name="app", version=1, owner="me", sources={}, functions=(), schedules=(spec,)
    )
    deployed = Deployed(1, record, 0, {spec: 0.0})
    host._applications._replace(deployed)
    await host._invocations.start()  # watches schedules once it knows the time of the log
    try:
        watched = [told["schedule"] for told in host.status()["schedules"]]
        assert watched == ["app.f * * * * * UTC"]
        host._applications._does_not_load(deployed, DeployError("No."))
        assert host.status()["schedules"] == []
    finally:
        await host._invocations.stop()


async def test_a_key_that_is_known_needs_no_worker_no_function_and_no_look_into_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = FunctionHost(Config(node=NodeConfig(workers=0, data_dir=tmp_path)), MemoryLogs())
    invocations = host._invocations
    await invocations.start()
    try:
        known = await invocations.accept("app.f", b"{}", key="k", delay_s=60)
        with pytest.raises(UnknownFunctionError):
            await host.send("app.f", b"{}", key="other")
        with monkeypatch.context() as patched:
            patched.setattr(invocations, "_log", None)
            assert await host.accept_once("app.f", b"{}", key="k") == known
            assert await host.send("app.f", b"{ }", key="k") == known
            with pytest.raises(UnknownFunctionError):
                await host.send("app.f", b"{}")
    finally:
        await invocations.stop()
