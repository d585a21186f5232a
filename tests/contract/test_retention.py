"""What every kind of log guarantees about retention policies. The newest one applies, trims do not
change it, and an invalid one is refused in a sentence.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from indilog.base.errors import InvalidTagError
from indilog.base.log import Log, LogSource, Session
from indilog.base.retention import Retention
from tests.contract.kinds import KINDS

pytestmark = pytest.mark.asyncio

DAY_S = 86_400.0


async def test_a_log_without_a_policy_keeps_everything(log: Log) -> None:
    await log.append(b"x")
    assert await log.retention() == Retention()
    assert (await log.retention()).keeps_all


async def test_the_last_policy_replaces_the_previous_one_as_a_whole(log: Log) -> None:
    await log.set_retention(age_s=7 * DAY_S)
    assert await log.retention() == Retention(age_s=7 * DAY_S)
    await log.set_retention(size_bytes=10 * 2**30)
    assert await log.retention() == Retention(size_bytes=10 * 2**30)
    await log.set_retention(age_s=DAY_S, size_bytes=2**40)
    assert await log.retention() == Retention(age_s=DAY_S, size_bytes=2**40)
    await log.set_retention()
    assert (await log.retention()).keeps_all


async def test_a_policy_applies_to_one_log_and_is_not_a_record_of_it(
    log: Log, logs: LogSource
) -> None:
    other = logs.log(log.name + "-other", Session())
    first = await log.append(b"x")
    await log.set_retention(age_s=DAY_S)
    assert (await other.retention()).keeps_all
    assert [r.seqnum for r in await log.read_range()] == [first]


async def test_trimming_a_log_leaves_its_policy(log: Log) -> None:
    await log.append(b"x")
    await log.set_retention(age_s=DAY_S)
    await log.trim(await log.tail())
    assert await log.retention() == Retention(age_s=DAY_S)


@pytest.mark.parametrize("bad", [0, -1, -0.5, float("nan"), float("inf"), True, "7d"])
async def test_an_invalid_policy_bound_is_refused(log: Log, bad: object) -> None:
    await log.set_retention(age_s=DAY_S)
    with pytest.raises(ValueError, match="age_s must be a number of seconds, 1 or more, not"):
        await log.set_retention(age_s=bad)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="size_bytes must be a number of bytes greater than 0, not"
    ):
        await log.set_retention(size_bytes=bad)  # type: ignore[arg-type]
    assert await log.retention() == Retention(age_s=DAY_S)


async def test_the_platforms_own_logs_keep_everything(logs: LogSource) -> None:
    with pytest.raises(InvalidTagError):
        await logs.log("$apps", Session()).set_retention(age_s=1.0)


@pytest.mark.parametrize("name", [n for n, kind in KINDS.items() if kind.durable])
async def test_a_policy_survives_a_restart(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    async with kind.open(tmp_path) as logs:
        await logs.log("orders", Session()).set_retention(age_s=DAY_S, size_bytes=2**30)
    async with kind.open(tmp_path) as logs:
        kept = await logs.log("orders", Session()).retention()
        assert kept == Retention(age_s=DAY_S, size_bytes=2**30)
