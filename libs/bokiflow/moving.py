"""Moves open runs to the code of another deployment: the operations `runs.move` and
`runs.move_all` (docs/decisions/0089-moved-runs.md).

An operation only requests the move, after a replay with the other code. The owner of the run then
moves it. `Flow` registers the operations, which use `RunOperations` and `Handle.move_read`.
"""

from __future__ import annotations

from typing import Final

from bokiflow.errors_for_people import errors_for_people
from bokiflow.inspection import RunOperations
from bokiflow.run_lists import SCAN_S_MAX
from bokiflow.runs import waiting
from bokiflow.runs.errors import RunEndedError, RunNotMovedError
from bokiflow.runs.states import State
from indilog import App, Context, InvalidArgumentsError, NotFoundError
from indilog.sdk import runs

_OPEN: Final = (State.RUNNING, State.PARKED)


class _MoveOperations:
    def __init__(self, operations: RunOperations) -> None:
        self._operations = operations

    async def move(
        self,
        ctx: Context,
        id: str,  # noqa: A002
        version: int | None = None,
        log: str = "",
    ) -> runs.MovedRun:
        """Continue a run with the code of another deployment, if that code continues its history.

        Args:
            ctx: context of the call.
            id: id of the run.
            version: number of a deployment whose code is kept; None: the newest one.
            log: name of the log of its flow, if several flows have a run with this id.
        """
        with errors_for_people():
            return runs.MovedRun(await self._move(ctx, id, version, log))

    async def _move(self, ctx: Context, id_: str, version: int | None, log: str) -> int:
        found = await self._operations.find(ctx, id_, log)
        handle = self._operations.handle_on(ctx, id_, found.log, found.workflow)
        return await handle.move_read(found.run, version)

    async def move_all(
        self,
        ctx: Context,
        *,
        version: int | None = None,
        workflow: str | None = None,
        state: State = State.RUNNING,
        id_prefix: str = "",
        older_s: float | None = None,
        newer_s: float | None = None,
        from_version: int | None = None,
        limit: int = 100,
        page: str | None = None,
    ) -> runs.MovedRuns:
        """Do the same as `runs.move` for the runs of a list, newest first.

        A call ends after some seconds, even if there are further runs.

        Args:
            ctx: context of the call.
            version: as for `runs.move`.
            workflow: only runs of this workflow.
            state: only runs in this state: running or parked.
            id_prefix: only runs whose id begins with this.
            older_s: only runs that began at least this many seconds ago.
            newer_s: only runs that began at most this many seconds ago.
            from_version: only runs whose code is now that of this deployment.
            limit: largest number of runs that one call tries to move (1 to 1,000).
            page: `next` of the page before.
        """
        if state not in _OPEN:
            problem = "is running or parked; a run that has ended is not moved"
            raise InvalidArgumentsError(
                f"Nothing was done: field 'state' {problem}.",
                [{"field": "state", "problem": problem}],
            )
        listed = await self._operations.list(
            ctx,
            workflow=workflow,
            state=state,
            id_prefix=id_prefix,
            older_s=older_s,
            newer_s=newer_s,
            version=from_version,
            limit=limit,
            before=_place_in(page),
        )
        with errors_for_people():
            return await self._move_listed(ctx, listed, version)

    async def _move_listed(
        self, ctx: Context, listed: runs.RunPage, version: int | None
    ) -> runs.MovedRuns:
        moved, refused, end = list[str](), list[runs.RunMismatch](), listed.next
        end_s = waiting.monotonic_now() + SCAN_S_MAX
        for run in listed:
            try:
                version = await self._move(ctx, run.id, version, run.log)
                moved += [run.id] if run.version != version else []
            except RunNotMovedError as error:
                refused.append(runs.RunMismatch(run.id, run.workflow, str(error)))
            except (RunEndedError, NotFoundError):
                pass  # the run has ended meanwhile
            if waiting.monotonic_now() > end_s and run is not listed.runs[-1]:
                end = run.place()
                break
        following = None if end is None else runs.cursor_of(end)
        return runs.MovedRuns(
            version=version, moved=tuple(moved), refused=tuple(refused), next=following
        )


def _place_in(page: str | None) -> runs.RunPlace | None:
    try:
        return None if page is None else runs.place_of(page)
    except ValueError as error:
        raise InvalidArgumentsError(
            f"Nothing was done: field 'page': {error}", [{"field": "page", "problem": str(error)}]
        ) from None


def add_move_operations(app: App, operations: RunOperations) -> None:
    """Add `runs.move` and `runs.move_all` to the operations of an application with flows."""
    moves = _MoveOperations(operations)
    app.add_operation(runs.MOVE_RUN, moves.move)
    app.add_operation(runs.MOVE_RUNS, moves.move_all)
