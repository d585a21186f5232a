"""Errors about applications that are not deployed, do not load, or have another owner.

`Applications` and `FunctionHost` raise these errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Final

from indilog.apps.app import check_app_name, is_operation_name
from indilog.base.errors import AppNameTakenError, DeployError, IndilogError, UnknownFunctionError
from indilog.sdk.runs import START_RUN
from indilog_compute.deployments import Deployment, DeploymentLog, PlacedDeployment
from indilog_compute.workers.call import DeployedApp

_SCHEDULES: Final = "schedules."
"""How the names of operations on schedules of workflows begin."""


def unknown_function(
    name: str, apps: Mapping[str, DeployedApp], log: DeploymentLog
) -> UnknownFunctionError:
    """Return the error for a call of an unknown function."""
    app, dot, function = name.partition(".")
    if not dot or not function:
        return UnknownFunctionError(f"A function is named app.function, not {name!r}.")
    if app not in apps:
        return unknown_app(app, apps, log)
    is_operation = is_operation_name(function)
    has_schedules = any(known.startswith(_SCHEDULES) for known in apps[app].functions)
    if function.startswith(_SCHEDULES) and not has_schedules:
        return UnknownFunctionError(
            f"App {app} has no workflow with a schedule; `indilog schedules` shows no schedules of "
            "functions."
        )
    same = [known for known in apps[app].functions if is_operation_name(known) == is_operation]
    near = get_close_matches(function, same, n=1)
    kind = "operation" if is_operation else "function"
    sentence = f"App {app} has no {kind} {function!r}{_did_you_mean(near)}"
    if not (near or is_operation) and START_RUN in apps[app].functions:
        sentence += f" If it is a workflow, `indilog runs start {app}.{function}` starts it."
    return UnknownFunctionError(sentence)


def no_function(name: str) -> UnknownFunctionError:
    """Return the error for a call of an operation as if it were a function."""
    return UnknownFunctionError(
        f"{name} is an operation for people, which cannot be called as a function."
    )


def unknown_app(
    name: str, apps: Mapping[str, DeployedApp], log: DeploymentLog
) -> UnknownFunctionError:
    """Return the error for an unknown application; `apps` are the deployed applications, and `log`
    knows all recorded deployments.
    """
    gone = log.newest.get(name)
    if gone is not None and gone.deployment.is_undeployed:
        return UnknownFunctionError(
            f"App {name} was undeployed at {_time_of(gone)}; deploy it again."
        )
    if log.losses:
        return UnknownFunctionError(
            f"No app {name!r} is deployed, or its deployment is lost: {log.losses.sentence} If it "
            "was deployed, deploy it again."
        )
    near = get_close_matches(name, apps, n=1)
    return UnknownFunctionError(f"No app {name!r} is deployed{_did_you_mean(near)}")


def undeployed_already(gone: PlacedDeployment) -> UnknownFunctionError:
    """Return the error for a second undeployment of an application."""
    name, at = gone.deployment.name, _time_of(gone)
    return UnknownFunctionError(f"App {name} was already undeployed at {at}; its logs stay.")


def _time_of(placed: PlacedDeployment) -> str:
    return datetime.fromtimestamp(placed.time, UTC).isoformat(timespec="seconds")


def _did_you_mean(near: list[str]) -> str:
    return f"; did you mean {near[0]!r}?" if near else "; `indilog apps` lists the deployed ones."


def problem_of(record: Deployment, error: IndilogError) -> str:
    """Return the message of the error for calls of an application that does not load."""
    return (
        f"App {record.name} does not load: {error} The import is retried periodically; if its "
        "code is the cause, deploy it again."
    )


def name_taken(name: str, owner: str) -> AppNameTakenError:
    """Return the error for a deployment under a name that another owner has."""
    return AppNameTakenError(
        f"The app name {name} is taken by {owner}; deploy under another name, or as that owner."
    )


def owner_differs(record: Deployment) -> AppNameTakenError:
    """Return the error for an undeployment of an application that another owner deployed."""
    return AppNameTakenError(
        f"App {record.name} was deployed by {record.owner}; undeploy it as that owner."
    )


def checked_name(name: str) -> str:
    """Return `name`, if an application may have this name.

    Raises:
        DeployError: the name is not allowed.
    """
    try:
        return check_app_name(name)
    except ValueError as error:
        raise DeployError(str(error)) from error
