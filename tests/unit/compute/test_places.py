"""The places of records, as a compute node looks them up."""

from __future__ import annotations

from pathlib import Path

import pytest

import indilog
from indilog_compute.local_log import LocalLog

pytestmark = pytest.mark.asyncio


async def test_places_cover_what_is_ordered_and_refuse_impossible_seqnums(tmp_path: Path) -> None:
    async with indilog.open(tmp_path / "data") as client:
        log = client.log("orders")
        assert isinstance(log, LocalLog)
        seqnums = [await log.append(b"x") for _ in range(3)]
        end = seqnums[-1] + 1
        found: list[int] = []
        while len(found) < 3:  # a storage node may not know the newest entries yet
            spans = await log.places(seqnums[len(found)], end + 100)
            assert spans, "an answer without places must reflect the session's position"
            found += [seqnum for span in spans for seqnum in range(span.first, span.end)]
        assert found == seqnums
        assert await log.places(end, end + 1) == ()
        for start, stop in ((2, 2), (3, 2), (-1, 2)):
            with pytest.raises(ValueError, match="seqnum"):
                await log.places(start, stop)
