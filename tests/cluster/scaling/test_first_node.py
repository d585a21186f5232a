"""The first compute node of a running cluster leaves. Its tags get another home, which checks the
conditions of appends, and another node enforces retention policies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

import indilog
from indilog.base.errors import (
    AppendOutcomeUnknownError,
    ConditionFailedError,
    IndilogError,
    TrimmedError,
)
from indilog.base.ids import NodeId, tag_hash
from indilog.base.log import After, Entry, Log
from indilog.runtime.cluster.supervisor import processes_config, supervised
from indilog_compute.conditional.home_requests import home_of
from tests.cluster.scaling.test_scale import DEADLINE_S, command, settings, until, wait_for_members
from tests.support.clients import http_client

pytestmark = pytest.mark.cluster

FIRST, SECOND, ADDED = NodeId("engine-0"), NodeId("engine-1"), NodeId("engine-2")
LOG = "counted"


def tag_of(home: NodeId) -> str:
    """Return a tag whose home at first is a compute node."""
    tags = (f"tag-{number}" for number in range(100))
    return next(tag for tag in tags if home_of((FIRST, SECOND), tag_hash(LOG, tag)) == home)


class Counter:
    """Appends one record after another with a tag, each after the last one that it knows."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.last: int | None = None
        self.appended: list[int] = []
        """The seqnums of records whose append succeeded."""
        self.unknown = 0
        self.refused = 0

    async def count(self, log: Log) -> None:
        """Append one record; if another one came before, read on from it."""
        after = After(self.tag, self.last)
        try:
            (self.last,) = await log.append_batch([Entry(b"counted", (self.tag,))], after=after)
            self.appended.append(self.last)
        except ConditionFailedError as error:
            self.refused += 1
            self.last = error.last_seqnum
        except AppendOutcomeUnknownError:
            self.unknown += 1
        except IndilogError as error:
            if not error.retryable:
                raise
            await asyncio.sleep(0.02)


class Contest:
    """Two callers for each of two tags, with different homes, append without end."""

    def __init__(self) -> None:
        self._pairs = [[Counter(tag_of(home)) for _ in range(2)] for home in (FIRST, SECOND)]

    @asynccontextmanager
    async def running(self, log: Log) -> AsyncIterator[None]:
        """Append while the block runs."""
        stopping = asyncio.Event()

        async def counts(counter: Counter) -> None:
            while not stopping.is_set():
                await counter.count(log)

        async with asyncio.TaskGroup() as tasks:
            for pair in self._pairs:
                for counter in pair:
                    tasks.create_task(counts(counter))
            yield
            stopping.set()

    def _totals(self) -> list[int]:
        return [len(mine.appended) + len(other.appended) for mine, other in self._pairs]

    async def more(self) -> None:
        """Wait until ten further appends with each tag succeeded."""
        wanted = [total + 10 for total in self._totals()]
        await until(lambda: all(map(int.__ge__, self._totals(), wanted)))

    async def check(self, log: Log) -> None:
        """Compare the log with what was acknowledged; the callers contended for each tag."""
        for mine, other in self._pairs:
            assert mine.refused + other.refused > 0
            appended = mine.appended + other.appended
            assert len(set(appended)) == len(appended)
            found = [record.seqnum for record in await log.read_range(tag=mine.tag, limit=10_000)]
            assert set(appended) <= set(found)
            assert len(found) - len(appended) <= mine.unknown + other.unknown


async def wait_until_empty(log: Log) -> None:
    """Wait until a retention policy has trimmed all of a log."""
    while True:
        try:
            if not await log.read_range(limit=1):
                return
        except TrimmedError as error:
            if not await log.read_range(bound=error.first_seqnum, limit=1):
                return
        await asyncio.sleep(0.02)


@pytest.mark.repeated("tests/unit/runtime/cluster/test_membership.py")
def test_the_first_compute_node_leaves_and_its_tags_get_another_home(tmp_path: Path) -> None:
    given = settings(tmp_path)
    given["cluster"]["engines"] = 2
    given["node"] |= {"retention_interval_s": 0.1}
    config = processes_config(overrides=given)
    contest = Contest()

    async def story() -> None:
        async with asyncio.timeout(DEADLINE_S), supervised(config) as supervisor:
            first_url = supervisor.url
            url = await supervisor.processes[SECOND].ready()
            async with indilog.connect(url) as client, http_client(url) as http:
                log = client.log(LOG)
                async with contest.running(log):
                    await contest.more()
                    await http.put("/cluster/members", json={"compute_nodes": 3})
                    await wait_for_members(
                        url, lambda installed: ADDED in installed["compute_nodes"]
                    )
                    printed = await command("drain", FIRST, "--url", first_url)
                    assert "engine-0 runs the gateway" in printed
                    await wait_for_members(
                        url, lambda installed: FIRST not in installed["compute_nodes"]
                    )
                    await until(lambda: FIRST not in supervisor.processes)
                    await contest.more()
                await contest.check(log)
                aged = client.log("aged")
                await aged.append(b"old")
                await aged.set_retention(age_s=1)
                await wait_until_empty(aged)
                assert supervisor.url == url, "the second compute node is the first one now"

    async def next_start() -> None:
        async with asyncio.timeout(DEADLINE_S), supervised(config) as supervisor:
            assert supervisor.view is not None
            assert supervisor.view.engines == (SECOND, ADDED)
            assert supervisor.view.homes == (ADDED, SECOND)
            async with indilog.connect(supervisor.url) as client:
                log = client.log(LOG)
                async with contest.running(log):
                    await contest.more()
                await contest.check(log)

    uvloop.run(story())
    uvloop.run(next_start())
