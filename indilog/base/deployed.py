"""What callers may know of what is deployed."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

CatchUp: TypeAlias = Literal["none", "last", "all"]


class FunctionSpec(msgspec.Struct, frozen=True):
    """What callers may know of a function: its name, its words, its JSON schemas.

    `is_async`: it can be stopped; otherwise it runs in a thread, which cannot. `public`: over HTTP
    it is called without a token.
    """

    name: str
    doc: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    timeout_s: float | None = None
    is_async: bool = True
    public: bool = False


class ScheduleSpec(msgspec.Struct, frozen=True):
    """When a function of an application is called by the platform (`App.schedule`)."""

    function: str
    expression: str
    timezone: str = "UTC"
    catch_up: CatchUp = "last"


ServiceActivity: TypeAlias = Literal["running", "waiting", "ended"]


class ServiceState(msgspec.Struct, frozen=True):
    """How a service is in one worker process.

    `deployment`: number of the deployment there. `state`: it runs, it failed and waits to be
    started again, or it returned. `failures`: since its worker began to run it; `problem`: the last
    one, in a sentence.
    """

    deployment: int
    name: str
    state: ServiceActivity
    failures: int = 0
    problem: str = ""


class AppInfo(msgspec.Struct, frozen=True):
    """One deployed application; `version` counts its deployments from 1."""

    name: str
    version: int
    owner: str
    functions: tuple[FunctionSpec, ...]
    services: tuple[str, ...] = ()
    schedules: tuple[ScheduleSpec, ...] = ()
