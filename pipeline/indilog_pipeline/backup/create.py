"""Makes a backup of a data directory, also beside a running platform (decision 0045).

An image (decision 0035) fixes the position of the backup. The entries of the image are committed,
so they never change, and its records are durable. Everything after the position is left out,
however long the backup takes. Batches that the platform moves meanwhile are found in a newer image.
Batches that the platform discards meanwhile hold trimmed records, so the backup takes its floors
from an image that is read last.

The image's catalog names the logs of other kinds than `shared`. These logs are copied when all
batches are in the backup (`cell_logs`).

An interrupted backup continues with its first plan. Parts that exist and are intact are not made
again. The command `indilog backup` calls `create`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from indilog.base.errors import ConfigError, DataDirectoryError, DataLossError, NotReadyError
from indilog.base.ids import Epoch, SeqNum
from indilog.kernel.records import batch_header
from indilog.runtime.journal.directory_lock import lock_directory
from indilog_pipeline.backup.catalog import StoredCatalog
from indilog_pipeline.backup.cell_logs import SegmentCopies
from indilog_pipeline.backup.files import (
    MANIFEST_FILE,
    ORDER_FILE,
    PLAN_FILE,
    Manifest,
    Plan,
    StoredBatch,
    batch_pieces,
    batches_in,
    digest_of,
    encoded,
    floors_of,
    order_pieces,
    part_name,
    plan_in,
    write_file,
)
from indilog_pipeline.log_image import LogImage
from indilog_pipeline.payloads import Chunk, Payloads

PART_BYTES: Final = 64 * 1024 * 1024
"""Approximate bytes of batches in a part. An interrupted backup repeats at most one part."""

Progress = Callable[[int, int], None]
"""Called with the number of parts written so far, and the number of all parts."""


class CreatedBackup(NamedTuple):
    """A whole backup.

    Attributes:
        tail: all seqnums of its `shared` logs are below this seqnum.
        kept: number of records of `shared` logs.
        segments: number of copied segments of logs of other kinds.
        left_out: the logs without which it was made.
    """

    tail: SeqNum
    kept: int
    segments: int
    left_out: Sequence[str] = ()


def create(
    data: Path,
    destination: Path,
    *,
    part_bytes: int = PART_BYTES,
    without: Collection[str] = (),
    progress: Progress = lambda *_: None,
) -> CreatedBackup:
    """Make a backup of the data directory `data` in `destination`, or continue a backup there.

    Args:
        data: the data directory.
        destination: directory of the backup.
        part_bytes: size of a file with records.
        without: logs of other kinds than `shared` that are left out, because they are lost.
        progress: called with the number of parts written so far, and the number of all parts.

    Raises:
        ConfigError: `destination` holds something else, a whole backup, or a part of a backup of
            another platform; or there is no such log to leave out.
        DataDirectoryError: `data` is no data directory; or a file of the backup is damaged.
        DataLossError: records that are not trimmed cannot be read from any replica.
        NotReadyError: a running platform moves files faster than they are read, or freed segments
            of a switched log meanwhile.
    """
    image = LogImage.read(data)
    try:
        destination.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = lock_directory(destination / "LOCK")
    except OSError as error:
        raise ConfigError(
            f"The backup {destination} cannot be written: {error.strerror or error}."
        ) from error
    try:
        if (destination / MANIFEST_FILE).exists():
            raise ConfigError(
                f"{destination} has a whole backup already, which never changes; choose another "
                "directory for a new one."
            )
        return _create(image, destination, part_bytes, without, progress)
    except OSError as error:
        raise DataDirectoryError(
            f"The backup {destination} cannot be written: {error.strerror or error}; make room, "
            "and run the same command again."
        ) from error
    finally:
        os.close(lock)


def _create(
    image: LogImage,
    destination: Path,
    part_bytes: int,
    without: Collection[str],
    progress: Progress,
) -> CreatedBackup:
    plan = _plan_for(image, destination, part_bytes)
    order = _order(image, destination, plan)
    payloads = Payloads(image)
    try:
        records = []
        for number in range(len(plan.starts)):
            progress(number, len(plan.starts))
            records.append(_part(payloads, destination, plan, number))
    finally:
        payloads.close()
    kept, epoch = 0, int(max(*plan.lineage.epochs, *image.writers[:, 2], 0))
    catalog = StoredCatalog()
    for number in range(len(plan.starts)):
        for batch in batches_in(destination, number):
            kept += batch.records
            epoch = max(epoch, _epoch_of(batch))
            catalog.take(batch)
    if unknown := sorted(set(without) - {each.log for each in catalog.segments()}):
        raise ConfigError(
            f"No log of another kind than shared has the name {unknown[0]}, so it cannot be left "
            "out."
        )
    try:
        with closing(SegmentCopies(image.directory, destination, without)) as copies:
            segments = [copies.stored(*each) for each in enumerate(catalog.segments())]
    except DataLossError:
        _refuse_freed(catalog, LogImage.read(image.directory), plan.tail)
        raise
    last = LogImage.read(image.directory)
    _refuse_loss(last, plan.tail)
    _refuse_freed(catalog, last, plan.tail)
    manifest = Manifest(
        digest_of(destination / PLAN_FILE),
        order,
        tuple(records),
        Epoch(epoch),
        floors_of(last.floors),
        kept,
        tuple(segments),
    )
    write_file(destination / MANIFEST_FILE, [encoded(manifest)])
    progress(len(plan.starts), len(plan.starts))
    return CreatedBackup(plan.tail, kept, manifest.copied, manifest.left_out)


def _order(image: LogImage, destination: Path, plan: Plan) -> str:
    """Write the file `order`; return its digest.

    Raises:
        ConfigError: it differs from the order of the interrupted backup.
    """
    path = destination / ORDER_FILE
    before = None
    if path.exists():
        with contextlib.suppress(DataDirectoryError):  # the file is damaged, so write it again
            before = digest_of(path)
    digest = write_file(path, order_pieces(image, plan.position))
    if before not in (None, digest):
        raise _other_platform(image, destination)
    return digest


def _plan_for(image: LogImage, destination: Path, part_bytes: int) -> Plan:
    """Return the plan in the destination, or write one for the image."""
    if (destination / PLAN_FILE).exists():
        plan = plan_in(destination)
        if image.position < plan.position or image.tail_before(plan.position) != plan.tail:
            raise _other_platform(image, destination)
        return plan
    if strange := [path.name for path in destination.iterdir() if path.name != "LOCK"]:
        raise ConfigError(
            f"{destination} holds other files (such as {min(strange)}); choose another directory."
        )
    _refuse_loss(image, image.tail)
    sums = np.cumsum(image.batches.bytes)
    of_part = sums // part_bytes if len(sums) else sums
    begins = np.flatnonzero(np.diff(of_part, prepend=-1))
    starts = [0, *image.batches.seqnums[begins][1:].tolist()]
    plan = Plan(
        os.urandom(8).hex(),
        image.position,
        image.tail,
        tuple(starts),
        tuple(sorted({*image.view.shards, *np.unique(image.ordered.shards).tolist()})),
        image.lineage,
    )
    write_file(destination / PLAN_FILE, [encoded(plan)])
    return plan


def _other_platform(image: LogImage, destination: Path) -> ConfigError:
    return ConfigError(
        f"{destination} holds the beginning of a backup of another platform than that of "
        f"{image.directory}; choose another directory."
    )


def _part(payloads: Payloads, destination: Path, plan: Plan, number: int) -> str:
    """Write a part, unless it exists and is intact; return its digest."""
    path = destination / part_name(number)
    if path.exists():
        try:
            return digest_of(path)
        except DataDirectoryError:
            path.unlink()  # damaged; the platform still has the records
    seqnums = plan.part(number)

    def pieces() -> Iterator[bytes]:
        for batch in _batches(payloads, seqnums):
            yield from batch_pieces(batch)

    return write_file(path, pieces())


def _batches(payloads: Payloads, seqnums: range) -> Iterator[StoredBatch]:
    """Yield the batches whose first seqnums are in a part."""
    at = seqnums.start
    while at < seqnums.stop:
        chunk = payloads.chunk(at, seqnums.stop, with_data=True)
        _refuse_damage(chunk)
        whole = chunk.columns.whole()
        for row, payload in zip(chunk.columns.batches.tolist(), whole, strict=True):
            if int(chunk.batches.seqnums[row]) >= at:
                yield StoredBatch(
                    chunk.batches.shards[row].item(),
                    int(chunk.batches.localids[row]),
                    int(chunk.batches.records[row]),
                    bytes(payload),
                )
        at = chunk.stop


def _refuse_damage(chunk: Chunk) -> None:
    damaged = [*chunk.columns.damaged.tolist(), *chunk.columns.batches[chunk.broken].tolist()]
    if damaged:
        seqnum = int(chunk.batches.seqnums[min(damaged)])
        raise DataLossError(
            f"The records from seqnum {seqnum} on are damaged in every replica, so there can be no "
            "whole backup. Trim them, or restore the data directory from an older backup."
        )


def _refuse_loss(image: LogImage, tail: SeqNum) -> None:
    lost = image.lost[image.lost[:, 0] < tail]
    if len(lost):
        start, end = lost[0].tolist()
        raise DataLossError(
            f"The records with seqnums {start} to {end - 1} are lost, so there can be no whole "
            "backup. If a replica is being repaired, wait for it, or trim them."
        )


def _refuse_freed(catalog: StoredCatalog, image: LogImage, tail: SeqNum) -> None:
    """Refuse a backup whose catalog names segments that were freed since: their cells may be
    deleted, and the records of the catalog trimmed.
    """
    if (log := catalog.freed_since(image.floors, tail)) is not None:
        raise NotReadyError(
            f"Old segments of log {log}, which was trimmed, were freed while the backup was made. "
            "Make a new backup in another directory."
        )


def _epoch_of(batch: StoredBatch) -> int:
    return int(batch_header(batch.payload).epoch)
