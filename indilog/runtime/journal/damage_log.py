"""Logs the damage that a start finds in its journal (docs/decisions/0009).

Damaged bytes stay in their file, so every start finds them again. If a damaged batch was repaired,
a later frame holds it; one log line counts all repaired batches. Any other damage gets its own log
line at each start. `recovery` uses this module.
"""

from __future__ import annotations

from typing import NamedTuple

import structlog

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import LocalId, ShardId
from indilog.kernel.records import batch_header
from indilog.kernel.tombstones import decode_gone
from indilog.roles.role import FrameKind
from indilog.runtime.journal.journal import Journal
from indilog.runtime.journal.segment import BATCH_KINDS
from indilog.runtime.journal.segment_scan import Damage

log = structlog.get_logger(__name__)


class _Batch(NamedTuple):
    """The records in a frame of a stream."""

    stream: int
    shard: ShardId
    first: LocalId
    end: LocalId


class DamageLog:
    """Collects the damage that one recovery finds; `conclude` logs it."""

    def __init__(self) -> None:
        self._met: list[tuple[Damage, _Batch | None]] = []
        self._missing: set[_Batch] = set()

    def met(self, damage: Damage) -> None:
        """Add damage that was found."""
        batch = _batch_of(damage)
        self._met.append((damage._replace(payload=b""), batch))
        if batch is not None:
            self._missing.add(batch)

    def recovered(self, stream: int, kind: FrameKind, payload: bytes) -> None:
        """Note a replayed frame: its records are not missing."""
        if not self._missing:
            return
        if kind is FrameKind.REPAIRED:
            header = batch_header(payload)
            self._missing.discard(_Batch(stream, header.shard, header.first, header.end))
        elif kind is FrameKind.GONE_RECORDS:  # the records were repaired, and later trimmed
            gone = decode_gone(payload)
            if gone.repaired:
                self._missing.discard(_Batch(stream, gone.shard, gone.first, gone.end))

    def conclude(self, journal: Journal) -> None:
        """Log which bytes of the journal's files are damaged."""
        repaired = 0
        for damage, batch in self._met:
            if batch is not None and batch not in self._missing:
                repaired += 1
                continue
            log.error(
                "the journal is damaged",
                file=str(journal.files.path(damage.segment)),
                offset=damage.start,
                bytes=damage.end - damage.start,
                **_records_of(batch),
            )
        if repaired:
            log.warning("batches of the journal were damaged and repaired since", batches=repaired)


def _records_of(batch: _Batch | None) -> dict[str, object]:
    """Return the damaged records for a log line; seqnums are unknown until recovery ends."""
    if batch is None:
        return {"records": "unknown"}
    return {
        "records": batch.end - batch.first,
        "shard": batch.shard,
        "first_localid": batch.first,
    }


def _batch_of(damage: Damage) -> _Batch | None:
    """Return the records of a damaged frame; None: its records are unknown."""
    frame = damage.header
    if frame is None or frame.kind not in BATCH_KINDS:
        return None
    try:
        header = batch_header(damage.payload)
    except MalformedFrameError:
        return None
    return _Batch(frame.stream, header.shard, header.first, header.end)
