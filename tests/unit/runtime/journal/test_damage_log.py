"""Which damage a start logs: one line covers all damage that was repaired since."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from indilog.base.errors import DataLossError
from indilog.kernel.records import batch_header
from indilog.kernel.tombstones import encode_gone, gone_of
from indilog.roles.role import FrameKind, Location
from indilog.runtime.journal.journal import Journal
from indilog.runtime.journal.recovery import recover
from indilog.runtime.journal.segment import FRAME_HEADER_BYTES, segment_path
from tests.unit.runtime.journals import SEGMENT_BYTES, STREAM, Taker, batch, spoil

DAMAGED = "the journal is damaged"
REPAIRED = "batches of the journal were damaged and repaired since"


def written(directory: Path, *frames: tuple[FrameKind, bytes]) -> list[Location]:
    """Write further frames to the journal; return their locations."""
    journal = Journal.open(directory, segment_bytes=SEGMENT_BYTES, durability="fsync")
    list(journal.recover())
    places: list[Location] = []
    for kind, payload in frames:
        places.append(journal.write(STREAM, kind, payload))
        journal.sync()
    journal.close()
    return places


def logged_damage(directory: Path, role: Taker | None = None) -> list[dict[str, Any]]:
    """Return the damage that a start logs, also if the start fails."""
    journal = Journal.open(directory, segment_bytes=SEGMENT_BYTES, durability="fsync")
    try:
        with capture_logs() as lines, contextlib.suppress(DataLossError):
            recover(journal, {STREAM: role or Taker()})
    finally:
        journal.close()
    return [dict(line) for line in lines if line["event"] in {DAMAGED, REPAIRED}]


@pytest.fixture
def places(tmp_path: Path) -> list[Location]:
    """Return the locations of four batches with a frame after them; the second and third are
    damaged.
    """
    found = written(
        tmp_path,
        *[(FrameKind.RECORDS, batch(first=3 * number)) for number in range(4)],
        (FrameKind.METALOG, b"behind them"),
    )
    for place in found[1:3]:
        spoil_end(tmp_path, place)
    return found


def spoil_end(directory: Path, place: Location) -> None:
    spoil(segment_path(directory, place.segment), place.offset + place.length - 8, 4)


def test_repaired_damage_shares_one_log_line_and_new_damage_gets_its_own(
    tmp_path: Path, places: list[Location]
) -> None:
    def errors(lines: list[dict[str, Any]]) -> list[tuple[int, int]]:
        return [(line["offset"], line["records"]) for line in lines if line["event"] == DAMAGED]

    offsets = [place.offset - FRAME_HEADER_BYTES for place in places]
    assert errors(logged_damage(tmp_path)) == [(offsets[1], 3), (offsets[2], 3)]
    shard = batch_header(batch(first=3)).shard
    named = [(line["shard"], line["first_localid"]) for line in logged_damage(tmp_path)]
    assert named == [(shard, 3), (shard, 6)]
    written(tmp_path, (FrameKind.REPAIRED, batch(first=6)))
    [first, summary] = logged_damage(tmp_path)
    assert (errors([first]), summary["batches"]) == ([(offsets[1], 3)], 1)
    [repaired] = written(tmp_path, (FrameKind.REPAIRED, batch(first=3)))
    [summary] = logged_damage(tmp_path)
    assert (summary["event"], summary["batches"]) == (REPAIRED, 2)
    written(tmp_path, (FrameKind.METALOG, b"behind them"))
    spoil_end(tmp_path, places[3])
    spoil_end(tmp_path, repaired)
    again = [offsets[1], offsets[3], repaired.offset - FRAME_HEADER_BYTES]
    *lines, summary = logged_damage(tmp_path)
    assert errors(lines) == [(offset, 3) for offset in again]
    assert summary["batches"] == 1


def test_damage_that_was_repaired_and_then_trimmed_is_not_logged(
    tmp_path: Path, places: list[Location]
) -> None:
    assert len(places) == 5
    for number, is_repair in ((1, True), (2, False)):
        gone = gone_of(batch_header(batch(first=3 * number)), repaired=is_repair)
        written(tmp_path, (FrameKind.GONE_RECORDS, encode_gone(gone)))
    [first, summary] = logged_damage(tmp_path)
    assert (first["event"], summary["event"], summary["batches"]) == (DAMAGED, REPAIRED, 1)


def test_damage_with_unknown_contents_is_logged_at_every_start(
    tmp_path: Path, places: list[Location]
) -> None:
    for place in places[1:3]:
        spoil(segment_path(tmp_path, 1), place.offset - FRAME_HEADER_BYTES, 64)
    written(tmp_path, *[(FrameKind.REPAIRED, batch(first=first)) for first in (3, 6)])
    for _ in range(2):
        assert [(line["event"], line["records"]) for line in logged_damage(tmp_path)] == [
            (DAMAGED, "unknown")
        ]


def test_damage_is_logged_when_a_role_refuses_to_start(
    tmp_path: Path, places: list[Location]
) -> None:
    """The log line names the file to look at."""
    assert len(places) == 5
    lines = logged_damage(tmp_path, Taker(refused=FrameKind.METALOG))
    assert [line["event"] for line in lines] == [DAMAGED] * 2
