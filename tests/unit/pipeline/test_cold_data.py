"""The programs of the pipeline over a data directory whose old records are on cold storage."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from indilog.base.ids import SeqNum
from indilog.base.log import Entry, Session
from indilog.cli.commands import app
from indilog.runtime.cluster.assembly import embedded
from indilog_pipeline.rebuild.verify import verify_index
from tests.support.cold_storage import configured, move_records, objects


async def fill(directory: Path) -> dict[SeqNum, Entry]:
    """Fill a platform until most of its records are in objects; some are trimmed."""
    async with embedded(configured(directory)) as platform:
        log = platform.logs.log("orders")
        records = await move_records(platform, log)
        await platform.logs.log("short", Session()).append(b"of another log", tags=["tag-3"])
        await log.trim(sorted(records)[5])
    return {seqnum: entry for seqnum, entry in records.items() if seqnum >= sorted(records)[5]}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[SeqNum, Entry]]:
    directory = tmp_path_factory.mktemp("cold")
    return directory, asyncio.run(fill(directory))


@pytest.fixture
def cold(
    original: tuple[Path, dict[SeqNum, Entry]], tmp_path: Path
) -> tuple[Path, dict[SeqNum, Entry]]:
    """Return a copy of the data directory; the objects stay where they are."""
    directory, records = original
    shutil.copytree(directory / "data", tmp_path / "data")
    assert len(objects(directory)) > 5
    return tmp_path / "data", records


def test_an_export_has_cold_and_local_records(
    cold: tuple[Path, dict[SeqNum, Entry]], tmp_path: Path
) -> None:
    directory, records = cold
    result = CliRunner().invoke(app, ["export", str(directory), "orders", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    rows = [
        (row["seqnum"], row["data"], row["tag_names"])
        for path in (tmp_path / "out").glob("date=*/bucket=*/*.parquet")
        for row in pq.ParquetFile(path).read().to_pylist()
    ]
    assert sorted(rows) == [
        (seqnum, entry.data, list(map(str, entry.tags)))
        for seqnum, entry in sorted(records.items())
    ]


def test_an_index_is_rebuilt_from_cold_records_and_verified(
    cold: tuple[Path, dict[SeqNum, Entry]],
) -> None:
    directory, records = cold
    shutil.rmtree(directory / "snapshots", ignore_errors=True)
    result = CliRunner().invoke(app, ["rebuild-index", str(directory), "--engine", "local"])
    assert result.exit_code == 0, result.output
    compared, difference, *_ = verify_index(directory)
    assert difference is None
    assert sum(one.rows for one in compared) > 3 * len(records)
    verified = CliRunner().invoke(app, ["rebuild-index", str(directory), "--verify"])
    assert verified.exit_code == 0, verified.output


def test_a_store_that_is_away_is_no_loss_but_an_error_that_names_it(
    original: tuple[Path, dict[SeqNum, Entry]], cold: tuple[Path, dict[SeqNum, Entry]]
) -> None:
    directory, _ = cold
    place, away = original[0] / "cold", original[0] / "away"
    shutil.rmtree(directory / "snapshots", ignore_errors=True)
    place.rename(away)
    try:
        rebuilt = CliRunner().invoke(app, ["rebuild-index", str(directory), "--engine", "local"])
        exported = CliRunner().invoke(
            app, ["export", str(directory), "orders", str(directory / "x")]
        )
    finally:
        away.rename(place)
    for result in (rebuilt, exported):
        assert result.exit_code == 1
        assert str(place) in result.output.replace("\n", "")
