"""Measures cold storage (decision 0039): the speed of moving records, their size there, and the
latency of reading one record there and from the journal. Also measured: how fast one process reads
all records of the data directory, as Spark, `export` and `rebuild-index` do.

An embedded platform moves all full segments but the newest at once. Caches of records are off, so
every read reads the journal, or a row group of an object.

    python -m bench.cluster.cold_storage [--mib 256] [--record-bytes 1024] [--reads 500]
                                         [--place DIRECTORY-OR-S3-ADDRESS]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

from bench.support.harness import Report, command, latency, table_of
from indilog.base.ids import SeqNum
from indilog.base.log import Entry, Log
from indilog.config import MIB, Config, node_config
from indilog.runtime.cluster.assembly import Platform, embedded
from indilog_pipeline.log_image import LogImage
from indilog_pipeline.record_batches import COLUMNS, read_records
from indilog_storage.node import StorageNode

SEED = 1
_BATCH = 256
_SEGMENT_BYTES = 16 * MIB
_WAIT_S = 600.0
_LOCAL_MIB = 12
"""Less than a segment: these records stay on the local disk."""
_SCANS = 3
_WARM_UP = 20
"""Reads before the measured ones."""


def configured(directory: Path, place: str) -> Config:
    """Return the configuration of a platform that moves records as soon as possible."""
    return Config(
        node=node_config(
            data_dir=directory / "data",
            segment_bytes=_SEGMENT_BYTES,
            checkpoint_frames=200,
            record_cache_bytes_max=0,
            cold_place=place or str(directory / "cold"),
            cold_after_s=0.001,
            cold_bytes_per_s=1024 * MIB,
            cold_cache_bytes_max=1,
            rewrite_bytes_per_s=1024 * MIB,
        )
    )


def figure(platform: Platform, name: str) -> int:
    """Return a figure of all storage nodes together."""
    roles = [role for role in platform.shell.roles.values() if isinstance(role, StorageNode)]
    return sum(role.status()[name] for role in roles)


async def fill(log: Log, mib: int, record_bytes: int) -> list[SeqNum]:
    """Append records; return their seqnums. Half of the bytes of each are random."""
    chance, seqnums = random.Random(SEED), list[SeqNum]()
    while len(seqnums) * record_bytes < mib * MIB:
        half = record_bytes // 2
        entries = [
            Entry(chance.randbytes(half) + bytes(record_bytes - half), tags=[f"tag-{n % 100}"])
            for n in range(_BATCH)
        ]
        seqnums += await log.append_batch(entries)
    return seqnums


async def move_records(platform: Platform, log: Log) -> float:
    """Wait until no more records move; return the seconds. Meanwhile a few appends continue,
    because only appends make checkpoints due.
    """
    begun = last = time.perf_counter()
    bytes_moved = 0
    while time.perf_counter() - last < 3 and last - begun < _WAIT_S:
        await log.append_batch([Entry(b"x", tags=["later"])] * 2)
        await asyncio.sleep(0.02)
        if (now := figure(platform, "cold_bytes")) != bytes_moved:
            bytes_moved, last = now, time.perf_counter()
    return last - begun


async def read_each(log: Log, seqnums: list[SeqNum]) -> list[float]:
    """Read single records; return the seconds that each took."""
    seconds: list[float] = []
    for seqnum in seqnums:
        begun = time.perf_counter()
        record = await log.read(seqnum)
        seconds.append(time.perf_counter() - begun)
        assert record is not None, f"record {seqnum} was appended"
    return sorted(seconds[_WARM_UP:])


def scan_mib_per_s(directory: Path, start: SeqNum, end: SeqNum, record_bytes: int) -> float:
    """Read the records of [start, end) from the data directory; return MiB of data per second of
    processor time.
    """
    image = LogImage.read(directory)
    begun = time.process_time()
    count = sum(batch.num_rows for batch in read_records(image, start, end, columns=COLUMNS))
    seconds = time.process_time() - begun
    assert count == end - start, "every record of the range was read"
    return count * record_bytes / MIB / seconds


async def main(asked: argparse.Namespace) -> None:
    """Fill, wait for the moves, read cold and hot records."""
    report = Report("cold_storage", asked)
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as temporary:
        async with embedded(configured(Path(temporary), asked.place)) as platform:
            log = platform.logs.log("cold")
            seqnums = await fill(log, asked.mib, asked.record_bytes)
            seconds = await move_records(platform, log)
            cold_bytes, objects = (
                figure(platform, "cold_bytes"),
                figure(platform, "cold_object_bytes"),
            )
            chance = random.Random(SEED)
            old = seqnums[: len(seqnums) * cold_bytes // (asked.mib * MIB) // 2]
            assert old, "no records were moved: take more --mib"
            reads = figure(platform, "cold_reads")
            cold = await read_each(log, chance.choices(old, k=asked.reads + _WARM_UP))
            assert figure(platform, "cold_reads") - reads >= asked.reads, "they came from objects"
            hot_seqnums = await log.append_batch([Entry(bytes(asked.record_bytes))] * _BATCH)
            hot = await read_each(log, chance.choices(hot_seqnums, k=asked.reads + _WARM_UP))
            local = await fill(log, _LOCAL_MIB, asked.record_bytes)
            scans = {
                "moved": (old[0], old[-1] + 1),
                "local": (local[0], local[-1] + 1),
            }
            data = Path(temporary) / "data"
            scanned = {
                name: max(scan_mib_per_s(data, *place, asked.record_bytes) for _ in range(_SCANS))
                for name, place in scans.items()
            }
    table = table_of(f"{asked.mib} MiB of records of {asked.record_bytes} bytes", "", "figure")
    table.add_row("moved", f"{cold_bytes / MIB:,.0f} MiB in {seconds:.1f} s")
    table.add_row("moved per second", f"{cold_bytes / MIB / max(seconds, 1e-9):,.1f} MiB")
    table.add_row("object bytes for a byte of batches", f"{objects / max(cold_bytes, 1):.2f}")
    for name, speed in scanned.items():
        report.keep(f"scan of {name} records, MiB/s of CPU", speed)
        table.add_row(f"reading all columns of {name} records", f"{speed:,.0f} MiB/s of CPU")
    for name, found in (("cold", cold), ("hot", hot)):
        p50, p99 = found[len(found) // 2], found[len(found) * 99 // 100]
        table.add_row(f"read of a {name} record, p50, p99", f"{latency(p50)}, {latency(p99)}")
        report.keep(name, found)
    report.show(table)
    report.write()


if __name__ == "__main__":
    command(
        main,
        __doc__,
        mib={"type": int, "default": 256, "help": "MiB of records"},
        record_bytes={"type": int, "default": 1024, "help": "bytes of a record"},
        reads={"type": int, "default": 500, "help": "single reads of cold and of hot records"},
        place={"type": str, "default": "", "help": "of cold records; else a directory"},
    )
