"""What the error for a call of an unknown function suggests."""

from __future__ import annotations

import pytest

from indilog.base.deployed import FunctionSpec
from indilog.sdk.runs import START_RUN
from indilog.testing import MemoryLogs
from indilog_compute.deployments import Deployment, DeploymentLog
from indilog_compute.workers.call import DeployedApp
from indilog_compute.workers.refusals import unknown_function


def specs(*names: str) -> tuple[FunctionSpec, ...]:
    return tuple(FunctionSpec(name, "Words.", {}, {}, timeout_s=2.0) for name in names)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("shop.list_run", "App shop has no function 'list_run'; did you mean 'list_runs'?"),
        ("shop.schedules.list", "shows no schedules of functions."),
        ("shop.runs.lst", "App shop has no operation 'runs.lst'; did you mean 'runs.list'?"),
        ("shop.xyz", "`indilog runs start shop.xyz` starts it."),
        ("shp.list_runs", "No app 'shp' is deployed; did you mean 'shop'?"),
        ("shop.", "A function is named app.function, not 'shop.'."),
        ("shop", "A function is named app.function, not 'shop'."),
    ],
)
def test_a_near_name_of_the_same_kind_is_suggested(name: str, sentence: str) -> None:
    record = Deployment(
        name="shop", version=1, owner="me", sources={},
        functions=specs("list_runs"), operations=specs("runs.list", START_RUN),
    )  # fmt: skip
    apps = {"shop": DeployedApp(1, record, 0)}
    assert str(unknown_function(name, apps, DeploymentLog(MemoryLogs()))).endswith(sentence)


def test_a_misspelled_operation_on_schedules_is_suggested() -> None:
    record = Deployment(
        name="shop", version=1, owner="me", sources={},
        functions=(), operations=specs("schedules.list", "schedules.pause"),
    )  # fmt: skip
    apps = {"shop": DeployedApp(1, record, 0)}
    found = str(unknown_function("shop.schedules.lst", apps, DeploymentLog(MemoryLogs())))
    assert found.endswith("did you mean 'schedules.list'?")
