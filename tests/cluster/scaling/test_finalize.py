"""`indilog cluster finalize`: a shard gets no further records, and its compute node continues on a
new one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop

import indilog
from indilog import Record
from indilog.base.ids import ShardId
from indilog.runtime.cluster.cluster_state import layout_in
from indilog.runtime.cluster.supervisor import supervised
from indilog.scalog import ScalogLog
from tests.cluster.scaling.test_scale import DEADLINE_S, Load, command
from tests.cluster.scaling.test_shared_processes import config_in, run

pytestmark = pytest.mark.cluster


async def shards(url: str) -> dict[int, dict[str, Any]]:
    found = json.loads(await command("shards", "--json", "--url", url))
    return {shard["shard"]: shard for shard in found}


async def six_calls(urls: Sequence[str]) -> None:
    """Use Scalog's calls with a client at each compute node."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(indilog.connect(url)) for url in urls]
        log = ScalogLog("placed", *clients)
        assert await log.live_shards() == (1, 2, 4)
        log.set_shard_policy(lambda _data, tags, _shards: ShardId(int(tags[0])))
        placed = [await log.append_to_shard(b"%d" % n, tags=[n]) for n in (4, 1, 2, 4)]
        assert [shard for _, shard in placed] == [4, 1, 2, 4]
        for seqnum, shard in placed:
            record = await log.read_record(seqnum, shard)
            assert record is not None
            assert record.data == b"%d" % shard
        await log.trim(placed[1].seqnum)
        found = [record.seqnum async for record in islice(log.subscribe(placed[1].seqnum), 3)]
        assert found == [seqnum for seqnum, _ in placed[1:]]


async def islice(records: AsyncIterator[Record], count: int) -> AsyncIterator[Record]:
    async for record in records:
        yield record
        if not (count := count - 1):
            return


@pytest.mark.repeated("tests/properties/test_joins.py")
def test_a_shard_is_finalized_under_load_and_no_append_fails(tmp_path: Path) -> None:
    load = Load()

    async def story() -> None:
        async with asyncio.timeout(DEADLINE_S), supervised(config_in(tmp_path)) as supervisor:
            url = supervisor.url
            async with indilog.connect(url) as client:
                log = client.log("scaled")
                async with load.running(log):
                    await load.more()
                    for shard, grace in ((0, "10"), (3, "0")):
                        printed = await command(
                            "finalize", str(shard), "--cuts", grace, "--url", url
                        )
                        assert f"Shard {shard} is finalized." in printed
                        await load.more()
                found = await shards(url)
                assert {n: (of["writer"], of["finalized"]) for n, of in found.items()} == {
                    0: ("", True), 1: ("engine-1", False), 2: ("engine-2", False),
                    3: ("", True), 4: ("engine-0", False),
                }  # fmt: skip
                printed = await command("shards", "--url", url)
                [row] = [line for line in printed.splitlines() if line.strip().startswith("3 ")]
                assert "finalized" in row
                assert load._attempts == len(load.acknowledged), "no append failed"
                await load.check(log)
                with pytest.raises(AssertionError, match="2 == 0"):
                    await command("finalize", "9", "--url", url)
            urls = [await supervisor.processes[f"node-{n}"].ready() for n in range(3)]
            await six_calls(urls)

    async def next_start() -> None:
        async with (
            asyncio.timeout(DEADLINE_S),
            supervised(config_in(tmp_path)) as supervisor,
            indilog.connect(supervisor.url) as client,
        ):
            await load.check(client.log("scaled"))
            await load.append(client.log("scaled"), "again")
            await load.check(client.log("scaled"))

    uvloop.run(story())
    view = layout_in(tmp_path).view
    assert view.shards[0].finalized  # type: ignore[index]
    uvloop.run(next_start())
    run("rebuild-index", tmp_path)
    run("rebuild-index", tmp_path, "--verify")
