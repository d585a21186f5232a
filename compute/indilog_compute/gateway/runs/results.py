"""`GET /runs/{app}/{id}/result`: waits for the end of a run, and returns how the run ended.

The application reports how the run ended (operation `runs.result`). The gateway itself waits for
further records of the run, so a client that waits occupies no slot of the application. `RunRoutes`
calls `wait_for_result`.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import msgspec
from fastapi import Response

from indilog.base.errors import IndilogError
from indilog.base.log import LogSource, Session
from indilog.sdk.runs import RUN_RESULT, FoundResult
from indilog_compute.gateway.runs.operations import OperationAnswer, OperationCalls

_PAUSE_S: Final = 0.1
"""Shortest time in seconds between two questions to the application."""


async def wait_for_result(
    operations: OperationCalls, logs: LogSource, *, app: str, run: str, wait_s: float, position: int
) -> Response:
    """Return how a run ended. If the run has not ended after `wait_s` seconds, the answer says so.

    Args:
        operations: runs the operation.
        logs: the logs of this node, in which the gateway waits for further records of the run.
        app: name of the application.
        run: id of the run.
        wait_s: longest wait, in seconds.
        position: position of the client's session.
    """
    clock = asyncio.get_running_loop().time
    session, ends = Session(position), clock() + wait_s
    question = msgspec.json.encode({"id": run})
    while True:
        answer = await operations.run(app, RUN_RESULT, question, position=session.position)
        session.saw(answer.position)
        if answer.is_failure:
            return answer.response()
        found = msgspec.json.decode(answer.body, type=FoundResult)
        if found.has_ended or clock() >= ends:
            return _response(answer, found)
        await asyncio.sleep(min(_PAUSE_S, max(ends - clock(), 0)))
        with suppress(IndilogError):  # the application then reports the problem
            log = logs.log(found.log, session)
            await log.read_next(found.tag, found.next, wait=max(ends - clock(), 0))


def _response(answer: OperationAnswer, found: FoundResult) -> Response:
    return answer._replace(body=msgspec.json.encode(found.shown())).response()
