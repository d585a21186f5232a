"""The search for the executors of open runs, while the log is sometimes unavailable."""

from __future__ import annotations

import pytest

from bokiflow.runs import waiting
from bokiflow.runs.public_call import Stopped
from bokiflow.runs.records import RUNS_TAG, RunFinished, RunStarted, encode, run_tag
from bokiflow.takeover import dead_executors
from bokiflow.takeover.open_runs import find_executors_of_open_runs
from indilog.base.errors import NotReadyError
from indilog.base.ids import SeqNum
from indilog.base.log import Record
from indilog.testing import MemoryLogs
from tests.support.flow_executions import FLOW_LOG
from tests.support.hooked_log import HookedLogs, Read

pytestmark = pytest.mark.asyncio


class Away(HookedLogs):
    """Logs of which each third read fails, or each one."""

    def __init__(self) -> None:
        super().__init__()
        self.is_gone = False
        self.asked = 0
        self.reads: list[tuple[str | int | None, SeqNum]] = []

    async def after_read(self, read: Read, records: list[Record]) -> list[Record]:
        self.asked += 1
        if self.is_gone or self.asked % 3 == 0:
            raise NotReadyError("It is starting.")
        self.reads.append((read.tag, read.bound))
        return records


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pause(_: float) -> None: ...

    monkeypatch.setattr(waiting, "pause", pause)
    monkeypatch.setattr(dead_executors, "_PAGE", 4)


async def began(logs: MemoryLogs, run: str, executor: str) -> None:
    started = encode(RunStarted("waits", b"{}", executor, "version"))
    await logs.log(FLOW_LOG).append(started, tags=[run_tag(run), RUNS_TAG])


async def with_runs() -> Away:
    logs = Away()
    for number in range(20):
        await began(logs, f"r{number}", f"executor{number}")
    ended = encode(RunFinished(1, b"1"))
    await logs.log(FLOW_LOG).append(ended, tags=[run_tag("r3"), RUNS_TAG])
    return logs


async def test_an_interrupted_look_at_all_runs_continues_where_it_stopped() -> None:
    logs = await with_runs()
    found = await find_executors_of_open_runs(logs.log(FLOW_LOG))
    assert found == {f"executor{number}" for number in range(20) if number != 3}
    pages = [bound for tag, bound in logs.reads if tag == RUNS_TAG]
    assert len(pages) == len(set(pages)), "no page is read twice"


async def test_a_look_at_all_runs_ends_during_a_lasting_outage_of_the_log() -> None:
    logs = await with_runs()
    logs.is_gone = True
    with pytest.raises(Stopped):
        await find_executors_of_open_runs(logs.log(FLOW_LOG))
