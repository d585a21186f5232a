"""Descriptions of deployed applications, functions, schedules and services, for callers.

All are immutable values that can be sent as messages. Compute nodes and their workers
(`indilog_compute`) create them; the gateway sends them to clients and the command line.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec

CatchUp: TypeAlias = Literal["none", "last", "all"]
"""Which calls a schedule makes for due times that passed while the platform was down: none, only
the last, or all.
"""


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


_SCHEDULED: Final = re.compile(r"[0-9a-f]{16}-([0-9a-f]{1,12})")


def scheduled_invocation(schedule: str, due: float) -> str:
    """Return the id of the invocation at a due time (seconds since 1970) of a schedule."""
    digest = hashlib.blake2b(schedule.encode(), digest_size=8).hexdigest()
    return f"{digest}-{int(due):x}"


def due_time_in(invocation: str) -> float | None:
    """Return the due time in the id of an invocation; None: no schedule made the invocation."""
    found = _SCHEDULED.fullmatch(invocation)
    return float(int(found[1], 16)) if found else None


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


class LoadedVersion(msgspec.Struct, frozen=True, array_like=True):
    """A version of an application that a worker has loaded.

    `number`: number of the deployment in that worker. `version`: as in `AppInfo`. `newest`: number
    of the deployment that runs the application's new calls.
    """

    number: int
    version: int
    newest: int


class MissingVersion(msgspec.Struct, frozen=True, array_like=True):
    """A kept version of an application that a worker has not loaded.

    `newest`, `version`: as in `LoadedVersion`. `code`: digest of the version's sources. `problem`:
    why the worker has not loaded it.
    """

    newest: int
    version: int
    code: str
    problem: str


def code_digest(sources: Mapping[str, str]) -> str:
    """Return a digest of sources (relative path → text): 16 hexadecimal digits."""
    text = msgspec.json.encode(sorted(sources.items()))
    return hashlib.blake2b(text, digest_size=8).hexdigest()


class AppInfo(msgspec.Struct, frozen=True):
    """One deployed application. `version` counts its deployments from 1. `operations` are its
    operations for people (`App.add_operation`).
    """

    name: str
    version: int
    owner: str
    functions: tuple[FunctionSpec, ...]
    services: tuple[str, ...] = ()
    schedules: tuple[ScheduleSpec, ...] = ()
    operations: tuple[FunctionSpec, ...] = ()
