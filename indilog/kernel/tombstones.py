"""What is left in a journal of discarded record batches once their segment was rewritten
(ARCHITECTURE 13, decision 0016).

Which localids they had, and of which writer: so much recovery has to know to go on behind them.
Batches that followed one another in the journal are one such frame together.
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

    `repaired`: they filled a hole, so they do not follow on what stands before them.
    """

    shard: ShardId
    epoch: Epoch
    first: LocalId
    end: LocalId
    repaired: bool

    def joined(self, other: GoneRecords) -> GoneRecords | None:
        """Return these and those that follow on them as one; None: `other` does not follow on."""
        if self.repaired or other != (self.shard, self.epoch, self.end, other.end, False):
            return None
        return self._replace(end=other.end)


def gone_of(header: BatchHeader, *, repaired: bool) -> GoneRecords:
    """Return what is left of a batch."""
    return GoneRecords(header.shard, header.epoch, header.first, header.end, repaired)


def gone_encoded(gone: GoneRecords) -> bytes:
    """Return the bytes of it, as journals hold them; always equally many."""
    return _LAYOUT.pack(_VERSION, gone.repaired, gone.shard, gone.epoch, gone.first, gone.end)


def gone_decoded(payload: bytes) -> GoneRecords:
    """Return what `payload` holds.

    Raises:
        MalformedFrameError: it holds none that this version knows.
    """
    if len(payload) != _LAYOUT.size:
        raise MalformedFrameError(f"{len(payload)} bytes are no discarded records")
    version, repaired, shard, epoch, first, end = _LAYOUT.unpack(payload)
    if version != _VERSION or repaired > 1 or first >= end:
        raise MalformedFrameError(f"discarded records of version {version}, of [{first}, {end})")
    return GoneRecords(ShardId(shard), Epoch(epoch), first, end, bool(repaired))
