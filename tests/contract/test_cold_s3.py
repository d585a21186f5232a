"""Cold storage in an S3-compatible store, through a real server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from indilog.base.errors import NotReadyError
from indilog.runtime.cluster.assembly import embedded
from indilog_pipeline.log_image import LogImage
from indilog_pipeline.record_batches import Filter, read_records
from tests.support.cold_storage import check, configured, figures, move_records, wait_for
from tests.support.s3_server import S3Server, s3_running


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server; a platform's credentials are in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with s3_running() as running:
        yield running


def test_records_in_a_bucket_are_read_trimmed_and_found_by_other_programs(
    tmp_path: Path, server: S3Server
) -> None:
    config = configured(tmp_path, place=server.place)

    async def story() -> None:
        async with embedded(config) as platform:
            log = platform.logs.log("orders")
            records = await move_records(platform, log)
            await check(log, records)
            assert len(server.objects()) > 5
        async with embedded(config) as platform:
            log = platform.logs.log("orders")
            await check(log, records)
            image = LogImage.read(tmp_path / "data")
            batches = read_records(image, columns=["data"], wanted=Filter("orders"))
            data = [one for batch in batches for one in batch.column(0).to_pylist()]
            assert data == [records[seqnum].data for seqnum in sorted(records)]
            await log.trim(max(records) + 1)
            await wait_for(lambda: figures(platform, "cold_objects") == 0)
            await wait_for(lambda: figures(platform, "cold_deleted_objects") > 5)
            await wait_for(lambda: len(server.objects()) <= 1)  # one may be being made

    uvloop.run(story())


@pytest.mark.repeated("tests/contract/test_cold_tier.py")
def test_a_server_that_is_down_is_a_retryable_error_in_time(
    tmp_path: Path, server: S3Server
) -> None:
    config = configured(tmp_path, place=server.place, cold_timeout_s=2.0)

    async def story() -> None:
        async with embedded(config) as platform:
            log = platform.logs.log("orders")
            records = await move_records(platform, log)
        server.stop()
        async with embedded(config) as platform:
            log = platform.logs.log("orders")
            with pytest.raises(NotReadyError, match="Cold storage"):
                await log.read_next(bound=min(records))
            new = await log.append(b"new", tags=["tag-1"])
            record = await log.read_prev("tag-1")
            assert record is not None
            assert record.seqnum == new

    uvloop.run(story())
