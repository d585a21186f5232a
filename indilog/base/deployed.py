"""Descriptions of deployed applications, functions, schedules and services, for callers."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

CatchUp: TypeAlias = Literal["none", "last", "all"]


class FunctionSpec(msgspec.Struct, frozen=True):
    """Describes a function: its name, docstring and JSON schemas.

    `is_async`: the function can be cancelled; a sync function runs in a thread, which cannot be
    cancelled. `public`: HTTP callers need no token.
    """

    name: str
    doc: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    timeout_s: float | None = None
    is_async: bool = True
    public: bool = False


class ScheduleSpec(msgspec.Struct, frozen=True):
    """A schedule by which the platform calls a function (`App.schedule`)."""

    function: str
    expression: str
    timezone: str = "UTC"
    catch_up: CatchUp = "last"


ServiceActivity: TypeAlias = Literal["running", "waiting", "ended"]


class ServiceState(msgspec.Struct, frozen=True):
    """The state of a service in one worker process.

    `deployment`: number of the deployment in that worker. `state`: the service is running, waiting
    for a restart after a failure, or has returned. `failures`: number of failures since the worker
    began to run it. `problem`: a sentence about the last failure.
    """

    deployment: int
    name: str
    state: ServiceActivity
    failures: int = 0
    problem: str = ""


class AppInfo(msgspec.Struct, frozen=True):
    """One deployed application; `version` counts its deployments from 1. `operations` are those
    for people (`App.add_operation`).
    """

    name: str
    version: int
    owner: str
    functions: tuple[FunctionSpec, ...]
    services: tuple[str, ...] = ()
    schedules: tuple[ScheduleSpec, ...] = ()
    operations: tuple[FunctionSpec, ...] = ()
