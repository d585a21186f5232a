"""Whether storage nodes find damage on disks that nobody damaged.

Looked at while a run goes on. A batch that was discarded and then forgotten to be discarded shows
itself so: its frame is gone, as if by damage.
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
    {"flipped_bit", "unreadable", "lost_tags", "lost_data", "damaged_sequencer"}
)
_FOUND: Final = "a record batch on disk is damaged"


@contextmanager
def pages_of_a_byte() -> Iterator[None]:
    """Give back all of a discarded batch but its header, not whole pages only: batches are small.

    So whoever forgets that it was discarded does not find it as it was.
    """

    def punched(fd: int, place: Location) -> None:
        zeros = bytes(max(0, place.length - HEADER_BYTES))
        os = vars(segment)["os"]  # it stands for the disk of the simulation
        os.pwrite(fd, zeros, place.offset + HEADER_BYTES)

    with patch.object(discards, "punch", punched):
        yield


class ImaginedDamage:
    """Appends what contradicts it to `violations`, once."""

    def __init__(self, violations: list[Violation]) -> None:
        self._violations = violations
        self._told = False

    def note(self, cluster: SimulatedCluster, injected: Collection[str]) -> None:
        """Look at what was found so far, given which faults there were."""
        if self._told or _DAMAGING.intersection(injected):
            return
        for process in cluster.processes:
            if process.shell is not None and process.shell.metrics.ignored.get(_FOUND):
                self._told = True
                what = f"{process.name} found a damaged batch, and nothing was damaged"
                self._violations.append(Violation("damage", what))
