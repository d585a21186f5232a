"""Checks that storage nodes report no damage on disks without a fault.

A storage node that forgets that it has discarded a batch would report the freed frame as damaged.
The check runs during the whole run.
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
"""Faults after which storage nodes may report damage. A lost tail may contain the note that a batch
was discarded, while the bytes of the batch are freed already.
"""
_FOUND: Final = "a record batch on disk is damaged"


@contextmanager
def pages_of_a_byte() -> Iterator[None]:
    """Let the journal free all bytes of a discarded batch except its header.

    The real journal frees whole pages only, and the batches of a simulation are smaller. A replica
    that forgets a discard could still read such a batch.
    """

    def punched(fd: int, place: Location) -> None:
        zeros = bytes(max(0, place.length - HEADER_BYTES))
        os = vars(segment)["os"]  # it represents the disk of the simulation
        os.pwrite(fd, zeros, place.offset + HEADER_BYTES)

    with patch.object(discards, "punch", punched):
        yield


class FalseDamage:
    """Appends to `violations` damage that a node reports although no fault caused any, once."""

    def __init__(self, violations: list[Violation]) -> None:
        self._violations = violations
        self._has_reported = False

    def note(self, cluster: SimulatedCluster, injected: Collection[str]) -> None:
        """Check the damage reported so far; `injected`: the faults so far."""
        if self._has_reported or _DAMAGING.intersection(injected):
            return
        for process in cluster.processes:
            if process.shell is not None and process.shell.metrics.ignored.get(_FOUND):
                self._has_reported = True
                what = f"{process.name} found a damaged batch, and nothing was damaged"
                self._violations.append(Violation("damage", what))
