"""Judges the log after a run, by the checkers of `tests.simulation` and by the disks.

A run has no metalog, so the checkers know a session's horizon from what its callers saw, not from
its position. Seqnums of other logs than the load's are not judged, because libraries trim them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from indilog.kernel.records import RecordBatch
from indilog_pipeline.log_image import NO_FILE, LogImage
from tests.cluster.faults.test_log_image import records_in
from tests.nemesis.load.log_load import LOG
from tests.simulation.checkers import find_violations
from tests.simulation.history import Evidence, Operation, Seen

REPLICAS: Final = 3


def judged_log(
    operations: list[Operation],
    scans: Mapping[str, Sequence[Seen]],
    subscribed: Mapping[str, Sequence[Seen]],
    stamps: Mapping[int, float],
    tail: int,
) -> list[str]:
    """Return all violations of the log's guarantees.

    Args:
        operations: the history.
        scans: by compute node, what a scan returned after the run.
        subscribed: by compute node, what a subscription has shown.
        stamps: when each record was ordered, seconds since 1970.
        tail: end of the log after the run.
    """
    records = {
        record.seqnum: (LOG, record.data, record.tags) for scan in scans.values() for record in scan
    }
    operations = [o for o in operations if not _trimmed_elsewhere(o, records)]
    last = max((operation.position_after for operation in operations), default=0)
    evidence = Evidence(
        operations=operations,
        records=records,
        tails=[0] * (last + 2) + [tail],
        scans={(engine, LOG): list(scan) for engine, scan in scans.items()},
        shown=frozenset(range(tail)) - (_known(operations) - records.keys()),
        subscribed={(engine, LOG): shown for engine, shown in subscribed.items()},
        stamps=stamps,
    )
    return [f"{violation.check}: {violation.what}" for violation in find_violations(evidence)]


def _trimmed_elsewhere(operation: Operation, records: Mapping[int, object]) -> bool:
    """Return whether it read the seqnum of another log's record, which a library had trimmed."""
    is_read = operation.kind == "read" and operation.outcome == "trimmed"
    return is_read and operation.bound not in records


def _known(operations: Sequence[Operation]) -> frozenset[int]:
    """Return the seqnums that were acknowledged."""
    appends = [o for o in operations if o.entries and o.outcome == "ok"]
    return frozenset(seqnum for append in appends for seqnum in append.value)


def judged_disks(directory: Path, scan: Sequence[Seen]) -> Iterator[str]:
    """Yield what the disks of a stopped cluster have otherwise than a scan of the log.

    Every batch has all its copies again, unless all its records are trimmed: each replica discards
    such a batch when it rewrites the segment file.
    """
    image = LogImage.read(directory)
    found = records_in(image, LOG)
    shown = {record.seqnum: record.data for record in scan}
    if differing := sorted(s for s in found.keys() | shown if found.get(s) != shown.get(s)):
        yield f"disks: {len(differing)} records differ from the scan, from {differing[0]}"
    if len(image.lost):
        yield f"disks: seqnums {image.lost[:5].tolist()} are lost on all disks"
    copies = (image.batches.files != NO_FILE).sum(axis=1)
    few = [row for row in np.flatnonzero(copies < REPLICAS).tolist() if not _is_dead(image, row)]
    if few:
        first = image.batches.seqnums[few[0]]
        what = f"{len(few)} batches have fewer than {REPLICAS} copies, from seqnum {first}"
        yield f"copies: {what} of {image.tail}"


def _is_dead(image: LogImage, row: int) -> bool:
    """Return whether all records of a batch are trimmed."""
    places = image.batches
    files, offsets = places.files[row], places.offsets[row]
    replica = int(np.flatnonzero(files != NO_FILE)[0])
    path = image.files[files[replica]]
    assert isinstance(path, Path), "the nemesis has no cold storage"
    start = int(offsets[replica])
    with path.open("rb") as file:
        file.seek(start)
        payload = file.read(int(places.lengths[row][replica]))
    dead = image.floors.dead(int(places.seqnums[row]), *RecordBatch(payload).tag_columns())
    return bool(dead.all())
