"""Chooses the code with which a run continues (docs/decisions/0067-pinned-runs.md).

A worker has loaded the newest deployment of an application, and the earlier deployments whose code
open runs need. Only the flow of the newest deployment executes runs. It gets the workflows of the
earlier deployments from `Versions`, which `runner`, `taking` and `handle` ask for the code of a
run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Protocol

from bokiflow.definition import Definition
from bokiflow.runs.errors import FlowSettingsError
from bokiflow.runs.records import CodeVersion
from bokiflow.runs.run_state import RunState
from indilog import App
from indilog.sdk import DeployedVersion

_LIBRARY: Final = "bokiflow"


class VersionedFlow(Protocol):
    """The part of a `bokiflow.Flow`, of any deployment, that `Versions` uses."""

    @property
    def log_name(self) -> str:
        """The name of the log of its runs."""

    @property
    def definitions(self) -> dict[str, Definition]:
        """The workflows, by name."""

    @property
    def queries(self) -> dict[str, Any]:
        """The queries (`bokiflow.queries.Query`), by name."""


def flows_of(app: App) -> list[Any]:
    """Return the list of the flows of an application, in the order of their definition."""
    flows: list[Any] = app.of_libraries.setdefault(_LIBRARY, [])
    return flows


class Versions:
    """The code of a flow, in the deployments of its application that this process has loaded.

    It is the `FlowCode` of the flow's definitions.
    """

    def __init__(self, flow: VersionedFlow, app: App | None) -> None:
        self._flow = flow
        self._app = app

    @property
    def _deployed(self) -> DeployedVersion | None:
        return None if self._app is None else self._app.deployed

    @property
    def code(self) -> CodeVersion | None:
        """The version of the flow's own code; None: the flow is not deployed."""
        deployed = self._deployed
        return None if deployed is None else CodeVersion(deployed.version, deployed.code)

    @property
    def definitions(self) -> dict[str, Definition]:
        """The workflows of the flow's own code, by name."""
        return self._flow.definitions

    @property
    def newest(self) -> VersionedFlow:
        """The flow of the same log in the newest deployment. If the newest deployment has no such
        flow, this flow itself.
        """
        deployed = self._deployed
        if deployed is None or deployed.newest is self._app:
            return self._flow
        return next(self._of_log(deployed.newest), self._flow)

    def newest_of(self, workflow: str) -> Definition | None:
        """Return the newest code of a workflow; None: the newest deployment does not have it."""
        return self.newest.definitions.get(workflow)

    def choose(self, run: RunState) -> Definition | None:
        """Return the code with which a run continues; None: no loaded code has its workflow.

        If the run is parked, or the newest code of its workflow is not pinned, the run continues
        with the newest code. Otherwise it continues with the code with which it began, as long as
        that code is kept. Call `missing` first.
        """
        assert run.started is not None, "only a run that has begun continues"
        return self._chosen(run).definitions.get(run.started.workflow)

    def missing(self, run: RunState) -> str | None:
        """Return a text that says why a run must wait: its code is kept, but not loaded here. None:
        the run need not wait.
        """
        assert run.started is not None, "only a run that has begun waits for its code"
        newest = self._flow.definitions.get(run.started.workflow)
        if newest is not None and (run.parked is not None or not newest.is_pinned):
            return None
        deployed, code = self._deployed, run.code
        if deployed is None or code is None or code.digest in deployed.loaded:
            return None
        return deployed.missing.get(code.digest)

    def queries_of(self, run: RunState) -> Mapping[str, Any]:
        """Return the queries of the code with which a run continues, by name."""
        return self._chosen(run).queries

    def of(self, code: CodeVersion, workflow: str) -> Definition | None:
        """Return the code of a workflow in a deployment; None: the deployment is not loaded, or has
        no such workflow.
        """
        deployed = self._deployed
        app = None if deployed is None else deployed.loaded.get(code.digest)
        return None if app is None else self._definition_in(app, workflow)

    def target(self, workflow: str, version: int | None) -> Definition:
        """Return the code of a workflow to which runs may be moved.

        Args:
            workflow: name of the workflow.
            version: number of a deployment; None: the newest one.

        Raises:
            FlowSettingsError: there is no such code here, or a run would not stay with it.
        """
        deployed = self._deployed
        if deployed is None:
            raise FlowSettingsError(
                "No run was moved: the flow is not deployed, so its runs have one code."
            )
        there = {app.deployed.version: app for app in deployed.loaded.values() if app.deployed}
        newest = self.newest_of(workflow)
        wanted = max(there) if version is None else version
        if (app := there.get(wanted)) is None:
            numbers = ", ".join(map(str, sorted(there)))
            raise FlowSettingsError(
                f"No run was moved: the code of deployment {wanted} is not kept; that of these "
                f"deployments is: {numbers}."
            )
        if newest is not None and not newest.is_pinned and wanted != max(there):
            raise FlowSettingsError(
                f"No run was moved: runs of {workflow!r} continue with the newest code, because it "
                "calls wf.patched or says pinned=False."
            )
        if (definition := self._definition_in(app, workflow)) is None:
            raise FlowSettingsError(
                f"No run was moved: deployment {wanted} has no workflow {workflow!r}."
            )
        return definition

    def _definition_in(self, app: App, workflow: str) -> Definition | None:
        found = (flow.definitions.get(workflow) for flow in self._of_log(app))
        return next(filter(None, found), None)

    def _chosen(self, run: RunState) -> VersionedFlow:
        assert run.started is not None, "only a run that has begun continues"
        newest = self._flow.definitions.get(run.started.workflow)
        if newest is not None and (run.parked is not None or not newest.is_pinned):
            return self._flow
        deployed, code = self._deployed, run.code
        app = None if deployed is None or code is None else deployed.loaded.get(code.digest)
        flows = () if app is None else self._of_log(app)
        return next((f for f in flows if run.started.workflow in f.definitions), self._flow)

    def _of_log(self, app: App) -> Iterator[VersionedFlow]:
        return (flow for flow in flows_of(app) if flow.log_name == self._flow.log_name)


def code_after(run: RunState, definition: Definition) -> CodeVersion | None:
    """Return the code version of `definition` if the run was executed with other code before. None:
    the code is the same, or is not deployed.
    """
    code = definition.code
    if code is None or (run.code is not None and run.code.digest == code.digest):
        return None
    return code
