"""Claims about `indilog.testing.cluster`, and about names of logs, alike in every kind of log."""

from __future__ import annotations

from typing import Any

import pytest

import indilog.testing
from indilog.apps.app import Context
from indilog.base.errors import InvalidTagError
from indilog.base.log import check_log_name
from indilog.client import Client
from indilog.testing import MemoryLog, MemoryLogs, cluster


@pytest.mark.asyncio
async def test_a_test_gets_a_whole_platform_by_either_import() -> None:
    assert indilog.testing.cluster is cluster
    async with indilog.testing.cluster() as client:
        log = client.log("a/b")
        seqnum = await log.append(b"x", tags=["t"])
        record = await log.read_next("t")
        assert record is not None
        assert record.seqnum == seqnum


@pytest.mark.parametrize("name", ["$apps", "$x", "", "x" * 129, 3, None, ["a"], "a\x1fb"])
@pytest.mark.asyncio
async def test_a_name_that_no_log_of_a_user_may_have_is_refused_everywhere(
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


def test_a_name_may_have_slashes() -> None:
    assert check_log_name("a/b") == "a/b"
