"""Scalog's six calls (`indilog.scalog`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import pytest

import indilog
from indilog.base.errors import NotReadyError, SealedError
from indilog.base.ids import SeqNum, ShardId, UserTag
from indilog.base.log import Log, PlacedSpan
from indilog.scalog import ScalogLog, at_random, by_key


class Node:
    """A compute node, as far as appends need it: a client, and its log."""

    def __init__(self, shard: int | None, order: list[ShardId]) -> None:
        self.written = None if shard is None else ShardId(shard)
        self.appended: list[bytes] = []
        self.order = order
        self.error: Exception | None = None
        self.asked = 0

    def log(self, _name: str) -> Log:
        return cast("Log", self)

    async def shard(self) -> ShardId | None:
        self.asked += 1
        return self.written

    async def places(self, start: SeqNum, end: SeqNum) -> Sequence[PlacedSpan]:
        return [PlacedSpan(start, end, self.order[start], 0, 0)]

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        if self.error is not None:
            raise self.error
        self.appended.append(data)
        assert self.written is not None
        self.order.append(self.written)
        return len(self.order) - 1


def nodes(*shards: int | None) -> list[Node]:
    order: list[ShardId] = []
    return [Node(shard, order) for shard in shards]


def of_tag(_data: bytes, tags: Sequence[UserTag]) -> object:
    return tags[0]


@pytest.mark.asyncio
async def test_records_go_to_the_shard_that_the_policy_chooses() -> None:
    made = nodes(3, 5)
    log = ScalogLog("orders", *made)
    log.set_shard_policy(lambda _data, tags, _shards: ShardId(int(tags[0])))
    assert await log.append_to_shard(b"a", tags=[5]) == (0, 5)
    assert await log.append_to_shard(b"b", tags=[3]) == (1, 3)
    assert await log.append(b"c", tags=[5]) == 2
    assert [node.appended for node in made] == [[b"b"], [b"a", b"c"]]


@pytest.mark.asyncio
async def test_a_policy_that_chooses_no_live_shard_is_refused() -> None:
    log = ScalogLog("orders", *nodes(3, 5))
    log.set_shard_policy(lambda *_: ShardId(4))
    with pytest.raises(ValueError, match="chose shard 4; live are 3, 5"):
        await log.append(b"a")


@pytest.mark.asyncio
async def test_the_default_policy_uses_all_live_shards() -> None:
    made = nodes(1, 2, None)
    log = ScalogLog("orders", *made)
    for _ in range(60):
        await log.append(b"a")
    assert min(len(node.appended) for node in made[:2]) > 10
    assert made[2].appended == []


@pytest.mark.asyncio
async def test_a_finalized_shard_is_replaced_by_the_one_on_which_its_node_continues() -> None:
    first, second = nodes(0, 1)
    log = ScalogLog("orders", first, second)
    log.set_shard_policy(lambda _data, _tags, shards: min(shards))
    assert (await log.append_to_shard(b"a")).shard == 0
    first.written = ShardId(2)
    assert (await log.append_to_shard(b"b")).shard == 2, "the node continues there"
    assert (await log.append_to_shard(b"c")).shard == 1, "the smallest live shard"


@pytest.mark.asyncio
@pytest.mark.parametrize("error", [SealedError("taken"), NotReadyError("no shard")])
async def test_if_a_compute_node_has_left_another_shard_is_chosen(error: Exception) -> None:
    first, second = nodes(0, 1)
    log = ScalogLog("orders", first, second)
    log.set_shard_policy(lambda _data, _tags, shards: min(shards))
    await log.append(b"a")
    first.error, first.written = error, None
    assert await log.append_to_shard(b"b") == (1, 1)
    second.error, second.written = error, None
    with pytest.raises(NotReadyError, match="No compute node"):
        await log.append(b"c")


@pytest.mark.asyncio
async def test_live_shards_are_asked_for_once_until_they_change() -> None:
    (node,) = made = nodes(0)
    log = ScalogLog("orders", *made)
    for _ in range(5):
        await log.append(b"a")
    assert node.asked == 1


def test_all_records_of_a_key_go_to_one_shard_and_few_keys_move() -> None:
    """VScalog (5.3) maps each object to one shard."""
    policy = by_key(of_tag)
    shards = [ShardId(number) for number in range(4)]
    before = {key: policy(b"", [key], shards) for key in map(str, range(400))}
    assert before == {key: policy(b"other", [key], shards) for key in before}
    counts = Counter(before.values())
    assert counts.keys() == set(shards)
    assert min(counts.values()) > 60
    after = {key: policy(b"", [key], [*shards[1:], ShardId(9)]) for key in before}
    moved = [key for key in before if before[key] != after[key]]
    assert all(before[key] == 0 or after[key] == 9 for key in moved)


def test_a_log_without_clients_is_refused() -> None:
    with pytest.raises(ValueError, match="needs clients"):
        ScalogLog("orders")
    assert at_random(b"", (), [ShardId(7)]) == 7


@pytest.mark.asyncio
async def test_the_six_calls_on_a_platform(tmp_path: Path) -> None:
    async with indilog.open(tmp_path) as client:
        log = ScalogLog("orders", client)
        assert await log.live_shards() == (0,)
        placed = [await log.append_to_shard(b"%d" % n, tags=["new"]) for n in range(4)]
        assert [shard for _, shard in placed] == [0] * 4
        record = await log.read_record(*placed[2])
        assert record is not None
        assert (record.data, record.tags) == (b"2", ("new",))
        assert await log.read_record(placed[3].seqnum + 1, ShardId(0)) is None
        await log.trim(placed[1].seqnum)
        with pytest.raises(indilog.TrimmedError):
            await log.read_record(*placed[0])
        found = []
        async for record in log.subscribe(placed[1].seqnum):
            found.append(record.data)
            if len(found) == 3:
                break
        assert found == [b"1", b"2", b"3"]
