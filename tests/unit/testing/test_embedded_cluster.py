"""`indilog.testing.cluster`, and the names of logs, equal in every kind of log."""

from __future__ import annotations

from typing import Any

import pytest

import indilog.testing
from indilog.apps.app import Context
from indilog.base.errors import InvalidTagError, WrongStateError
from indilog.base.log import check_log_name
from indilog.client import Client
from indilog.testing import MemoryLog, MemoryLogs, cluster


@pytest.mark.asyncio
async def test_a_test_gets_a_complete_platform_by_either_import() -> None:
    assert indilog.testing.cluster is cluster
    async with indilog.testing.cluster() as client:
        log = client.log("a/b")
        seqnum = await log.append(b"x", tags=["t"])
        record = await log.read_next("t")
        assert record is not None
        assert record.seqnum == seqnum


@pytest.mark.parametrize("name", ["$apps", "$x", "", "x" * 129, 3, None, ["a"], "a\x1fb"])
@pytest.mark.asyncio
async def test_a_reserved_log_name_is_refused_by_every_kind_of_log(
    name: Any,  # noqa: ANN401 - also what is no text
) -> None:
    for log in (
        Client(MemoryLogs()).log,
        Context(MemoryLogs(), None).log,  # type: ignore[arg-type]
        MemoryLog,
        check_log_name,
    ):
        with pytest.raises(InvalidTagError, match=r"log"):
            log(name)


def test_a_log_name_may_contain_slashes() -> None:
    assert check_log_name("a/b") == "a/b"


@pytest.mark.asyncio
async def test_a_test_uses_logs_of_all_kinds_and_lists_runs_of_all_apps() -> None:
    async with cluster() as client:
        assert (await client.create_log("ledger", "owned")).kind == "owned"
        log = client.log("ledger")
        assert [await log.append(b"x") for _ in range(3)] == [0, 1, 2]
        assert (await client.switch_log("ledger", "order-first", stripes=2)).stripes == 2
        assert [record.seqnum for record in await log.read_range()] == [0, 1, 2]
        assert [info.log for info in await client.logs()] == ["ledger"]
        with pytest.raises(WrongStateError, match="is of kind order-first"):
            await client.create_log("ledger", "object-store")
        assert (await client.held_invocations()).held == ()
        assert await client.release_invocations("shop/flow") == 0
        assert list(await client.runs()) == []
