"""Cold storage in an S3-compatible store, through a real server on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from moto.server import ThreadedMotoServer
from pyarrow import fs

from indilog.base.errors import NotReadyError
from indilog.runtime.cluster.assembly import embedded
from indilog_pipeline.log_image import LogImage
from indilog_pipeline.record_batches import Filter, read_records
from tests.support.cold_storage import check, configured, figures, moved, reached


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadedMotoServer]:
    """A server with the bucket `logs`; credentials are in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    started = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    started.start()
    system_of(started, allow_bucket_creation=True).create_dir("logs")
    yield started
    started.stop()


def address_of(server: ThreadedMotoServer) -> str:
    host, port = server.get_host_and_port()
    return f"{host}:{port}"


def system_of(
    server: ThreadedMotoServer, *, allow_bucket_creation: bool = False
) -> fs.S3FileSystem:
    return fs.S3FileSystem(
        endpoint_override=address_of(server),
        scheme="http",
        region="us-east-1",
        allow_bucket_creation=allow_bucket_creation,
    )


def place_of(server: ThreadedMotoServer) -> str:
    return f"s3://logs/prod?endpoint_override={address_of(server)}&scheme=http&region=us-east-1"


def objects_in(server: ThreadedMotoServer) -> list[str]:
    found = system_of(server).get_file_info(
        fs.FileSelector("logs/prod", recursive=True, allow_not_found=True)
    )
    return [info.path for info in found if info.path.endswith(".parquet")]


def test_records_in_a_bucket_are_read_trimmed_and_found_by_other_programs(
    tmp_path: Path, server: ThreadedMotoServer
) -> None:
    config = configured(tmp_path, place=place_of(server))

    async def story() -> None:
        async with embedded(config) as platform:
            log = platform.logs.log("orders")
            records = await moved(platform, log)
            await check(log, records)
            assert len(objects_in(server)) > 5
        async with embedded(config) as platform:
            log = platform.logs.log("orders")
            await check(log, records)
            image = LogImage.read(tmp_path / "data")
            batches = read_records(image, columns=["data"], wanted=Filter("orders"))
            data = [one for batch in batches for one in batch.column(0).to_pylist()]
            assert data == [records[seqnum].data for seqnum in sorted(records)]
            await log.trim(max(records) + 1)
            await reached(lambda: figures(platform, "cold_objects") == 0)
            await reached(lambda: figures(platform, "cold_deleted_objects") > 5)
            assert len(objects_in(server)) <= 1, "at most one that is being made"

    uvloop.run(story())


def test_a_server_that_is_down_is_a_retryable_error_in_time(
    tmp_path: Path, server: ThreadedMotoServer
) -> None:
    config = configured(tmp_path, place=place_of(server), cold_timeout_s=2.0)

    async def story() -> None:
        async with embedded(config) as platform:
            log = platform.logs.log("orders")
            records = await moved(platform, log)
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
