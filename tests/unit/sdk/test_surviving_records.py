"""The surviving records of a sub-stream of checkpoints, and whether a lost one may cover more."""

from __future__ import annotations

import pytest

from indilog.base.errors import DataLossError
from indilog.sdk.surviving_records import may_go_further, read_surviving_records
from tests.support.damaged_log import DamagedLogs
from tests.support.hooked_log import HookedLog, Read


@pytest.mark.asyncio
async def test_surviving_records_are_found_after_trimmed_ones_and_around_lost_ones() -> None:
    logs = DamagedLogs()
    log = logs.log("work")
    for number in range(9):
        await log.append(b"%d" % number, tags=["a"])
    await log.trim(2, tag="a")
    logs.lost = {4, 8}
    found = [one async for one in read_surviving_records(log, "a", limit=2)]
    places = [one.seqnum for one in found]
    assert places == [2, 3, 4, 5, 6, 7, 8]
    assert [one.seqnum for one in found if isinstance(one, DataLossError)] == [4, 8]


@pytest.mark.asyncio
async def test_a_loss_without_a_known_end_is_raised() -> None:
    class Broken(HookedLog):
        async def before_read(self, read: Read) -> None:
            raise DataLossError("Lost.")

    with pytest.raises(DataLossError):
        [one async for one in read_surviving_records(Broken("work"), "a", limit=2)]


@pytest.mark.parametrize(("end", "may"), [(0, True), (6, True), (7, False), (8, False)])
def test_only_a_checkpoint_beyond_the_place_of_the_lost_one_supersedes_it(
    end: int, may: bool
) -> None:
    """A checkpoint that stands at 7 is as of 7 at most."""
    assert may_go_further(DataLossError("Lost.", seqnum=5, next_seqnum=8), end) is may
    assert not may_go_further(None, end)
