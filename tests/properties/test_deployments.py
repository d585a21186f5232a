"""A trimmed log of deployments yields the same state as the untrimmed log."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from indilog.base.deployed import ScheduleSpec
from indilog.testing import MemoryLogs
from indilog_compute import deployments
from indilog_compute.deployments import APPS_LOG, Deployment, DeploymentLog

SPECS = (
    ScheduleSpec("f", "0 * * * *"),
    ScheduleSpec("f", "0 * * * *", catch_up="all"),
    ScheduleSpec("f", "0 0 * * *"),
)
NODES = st.integers(0, 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("deploy"),
            NODES,
            st.sampled_from("abc"),
            st.sampled_from(["me", "eve"]),
            st.lists(st.sampled_from(SPECS), unique=True, max_size=3),
            st.sampled_from(["x", "y", "z", None]),
            st.integers(0, 3),
        ),
        st.tuples(st.just("undeploy"), NODES, st.sampled_from("abc")),
        st.tuples(st.just("read"), NODES),
        st.tuples(st.just("collect"), NODES, st.integers(0, 3)),
        st.tuples(st.just("restart"), NODES),
    ),
    max_size=30,
)


class KilledError(Exception):
    """The node was killed."""


class Story:
    """Two nodes on one log that is trimmed, and the same records in an untrimmed log."""

    def __init__(self) -> None:
        self.now = 0.0
        self.logs = MemoryLogs(clock=lambda: self.now)
        self.whole = MemoryLogs(clock=lambda: self.now)
        self.nodes = [DeploymentLog(self.logs), DeploymentLog(self.logs)]

    async def do(self, step: tuple[Any, ...]) -> None:
        self.now += 10.0
        kind, index, *arguments = step
        node = self.nodes[index]
        if kind == "deploy":
            name, owner, schedules, text, keeps = arguments
            new = made(name, owner, text or str(self.now), tuple(schedules))
            if (placed := node.newest.get(name)) is not None:  # any of the earlier ones
                earlier = [one.seqnum for one in placed.earlier()]
                new = msgspec.structs.replace(new, keeps=tuple(earlier[keeps > 2 : keeps]))
            await self.append(index, new)
        elif kind == "undeploy":
            if (placed := node.newest.get(arguments[0])) is not None:
                await self.append(index, placed.deployment.undeployed())
        elif kind == "read":
            await node.catch_up()
        elif kind == "collect":
            await self.collect(index, *arguments)
        else:
            self.nodes[index] = DeploymentLog(self.logs)
            await self.nodes[index].catch_up()

    async def append(self, index: int, deployment: Deployment) -> None:
        seqnum = await self.nodes[index].append(deployment)
        record = await self.logs.log(APPS_LOG).read(seqnum)
        assert record is not None
        assert await self.whole.log(APPS_LOG).append(record.data, tags=[deployment.name]) == seqnum

    async def collect(self, index: int, trims: int) -> None:
        """Collect, up to a number of trims; then kill and restart the node."""
        node, left = self.nodes[index], [trims]
        trim = node._log.trim

        async def counted(until: int, *, tag: Any = None) -> None:  # noqa: ANN401 - as `Log.trim`
            if left[0] == 0:
                raise KilledError
            left[0] -= 1
            await trim(until, tag=tag)

        node._log.trim = counted  # type: ignore[method-assign]
        try:
            await node.collect()
        except KilledError:
            self.nodes[index] = DeploymentLog(self.logs)
            await self.nodes[index].catch_up()
        else:
            node._log.trim = trim  # type: ignore[method-assign]

    async def check(self) -> None:
        """Compare the state of each node, and that of a fresh start, with the state from all
        records.
        """
        expected = await state_of(DeploymentLog(self.whole))
        for node in (*self.nodes, DeploymentLog(self.logs)):
            assert await state_of(node) == expected


def made(name: str, owner: str, text: str, schedules: tuple[ScheduleSpec, ...]) -> Deployment:
    return Deployment(
        name=name,
        version=1,
        owner=owner,
        sources={"a.py": text},
        functions=(),
        schedules=schedules,
    )


async def state_of(log: DeploymentLog) -> dict[str, object]:
    """Return the state according to a log of deployments."""
    await log.catch_up()
    return {
        name: (
            placed.seqnum,
            placed.since,
            msgspec.structs.replace(placed.deployment, follows=None, since=()),
            [(one.seqnum, one.code) for one in placed.kept],
        )
        for name, placed in log.newest.items()
    }


@given(STEPS)
def test_a_reader_of_a_trimmed_deployment_log_reaches_the_same_state(
    steps: list[tuple[Any, ...]],
) -> None:
    """Deployments may be concurrent, and a node may be killed between any two trims."""

    async def story() -> None:
        made = Story()
        for step in steps:
            await made.do(step)
        await made.check()
        for index in (0, 1):
            await made.nodes[index].collect()
        await made.check()

    asyncio.run(story())


@given(STEPS)
def test_records_forgotten_by_a_node_change_no_deployment(steps: list[tuple[Any, ...]]) -> None:
    """A node remembers one undeployed application, and reads before it deploys."""

    async def story() -> None:
        made = Story()
        for step in steps:
            if step[0] in ("deploy", "undeploy"):
                await made.nodes[step[1]].catch_up()
            await made.do(step)
        expected = await deployed(DeploymentLog(made.whole))
        for node in (*made.nodes, DeploymentLog(made.logs)):
            assert await deployed(node) == expected

    with patch.object(deployments, "UNDEPLOYED_KEPT", 1):
        asyncio.run(story())


async def deployed(log: DeploymentLog) -> dict[str, object]:
    """Return the deployed applications according to a log of deployments."""
    await log.catch_up()
    gone = {name for name, placed in log.newest.items() if placed.deployment.is_undeployed}
    return {name: state for name, state in (await state_of(log)).items() if name not in gone}
