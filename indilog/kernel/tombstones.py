"""The frames that replace discarded record batches when their segment is rewritten (ARCHITECTURE
13, decision 0016).

Such a frame keeps the localids of the batches and the epoch of their writer. Recovery needs both to
continue the shard after the discarded records. Consecutive batches of the journal share one frame.
`indilog_storage` and `indilog.runtime.journal` write and read the frames.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import Epoch, LocalId, ShardId
from indilog.kernel.records import BatchHeader

_VERSION: Final = 1
_LAYOUT: Final = Struct("<BBHIQQ")


class GoneRecords(NamedTuple):
    """Records [first, end) of a shard, written under `epoch`.

    `repaired`: they filled a hole, so they need not follow the records before them in the journal.
    """

    shard: ShardId
    epoch: Epoch
    first: LocalId
    end: LocalId
    repaired: bool

    def joined(self, other: GoneRecords) -> GoneRecords | None:
        """Return both runs of records as one; None: `other` does not directly follow this run."""
        if self.repaired or other != (self.shard, self.epoch, self.end, other.end, False):
            return None
        return self._replace(end=other.end)


def gone_of(header: BatchHeader, *, repaired: bool) -> GoneRecords:
    """Return what a journal keeps of a discarded batch."""
    return GoneRecords(header.shard, header.epoch, header.first, header.end, repaired)


def encode_gone(gone: GoneRecords) -> bytes:
    """Return the bytes of a frame of discarded records. All such frames have the same size."""
    return _LAYOUT.pack(_VERSION, gone.repaired, gone.shard, gone.epoch, gone.first, gone.end)


def decode_gone(payload: bytes) -> GoneRecords:
    """Return what `payload` holds.

    Raises:
        MalformedFrameError: this release cannot decode the payload.
    """
    if len(payload) != _LAYOUT.size:
        raise MalformedFrameError(f"{len(payload)} bytes are no discarded records")
    version, repaired, shard, epoch, first, end = _LAYOUT.unpack(payload)
    if version != _VERSION or repaired > 1 or first >= end:
        raise MalformedFrameError(f"discarded records of version {version}, of [{first}, {end})")
    return GoneRecords(ShardId(shard), Epoch(epoch), first, end, bool(repaired))
