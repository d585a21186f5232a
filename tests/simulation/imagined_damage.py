"""Checks that storage nodes report no damage on disks without a fault.

The check runs during a run. It finds a discarded batch whose discard was forgotten: the frame of
the batch is gone, as if by damage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Final
from unittest.mock import patch

from indilog.kernel.records import HEADER_BYTES
from indilog.roles.role import Location
from indilog.runtime.journal import discards, segment
from indilog.testing.simulation import SimulatedCluster
from tests.simulation.history import Violation

_DAMAGING: Final = frozenset(
    {"flipped_bit", "unreadable", "lost_tags", "lost_data", "lost_tail", "damaged_sequencer"}
)
"""A lost tail may have held the note that a batch is discarded, whose bytes are freed already."""
_FOUND: Final = "a record batch on disk is damaged"


@contextmanager
def pages_of_a_byte() -> Iterator[None]:
    """Free all bytes of a discarded batch but its header, not only whole pages: batches are small.

    So a replica that forgets the discard cannot read the batch as it was.
    """

    def punched(fd: int, place: Location) -> None:
        zeros = bytes(max(0, place.length - HEADER_BYTES))
        os = vars(segment)["os"]  # it represents the disk of the simulation
        os.pwrite(fd, zeros, place.offset + HEADER_BYTES)

    with patch.object(discards, "punch", punched):
        yield


class ImaginedDamage:
    """Appends reported damage without a fault to `violations`, once."""

    def __init__(self, violations: list[Violation]) -> None:
        self._violations = violations
        self._has_reported = False

    def note(self, cluster: SimulatedCluster, injected: Collection[str]) -> None:
        """Check the damage found so far, given the faults that were injected."""
        if self._has_reported or _DAMAGING.intersection(injected):
            return
        for process in cluster.processes:
            if process.shell is not None and process.shell.metrics.ignored.get(_FOUND):
                self._has_reported = True
                what = f"{process.name} found a damaged batch, and nothing was damaged"
                self._violations.append(Violation("damage", what))
