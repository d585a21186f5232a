"""Finds record batches after their segments were rewritten (docs/decisions/0016 and 0028).

A role knows a batch by the location where the batch was first written. That location stays the
batch's *name*, even after a restart. `MovedFrames` maps the name to the current location, so roles
need not track rewrites. It needs 16 bytes of memory for each moved batch. `JournalReader` creates
the map, and `Rewriting` updates it.

A rewritten file ends with `MOVED` frames, which hold the names of its batches. The payload of a
`MOVED` frame is: version u8, three zero bytes, count n u32, n names u64 (segment << 32 | offset) in
ascending order, n offsets in this file u64.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from indilog.base.errors import MalformedFrameError
from indilog.roles.role import Location

_VERSION: Final = 1
_LAYOUT: Final = Struct("<B3xI")
_BATCHES_MAX: Final = 448
"""Largest number of batches in a `MOVED` frame, so that its payload is small enough to correct a
flipped bit.
"""


class Places:
    """The names of the batches in one rewritten file, and the offsets of the batches in the file.
    Both are in ascending order.
    """

    __slots__ = ("names", "offsets")

    def __init__(self) -> None:
        self.names = array("Q")
        """Segment and offset of each batch, as one number; ascending."""
        self.offsets = array("Q")

    def add(self, name: Location, offset: int) -> None:
        """Add the next batch, called `name`, at `offset`."""
        self.names.append(_packed(name))
        self.offsets.append(offset)

    def encode(self) -> Iterator[bytes]:
        """Yield the payloads of `MOVED` frames with all names."""
        for start in range(0, len(self.names), _BATCHES_MAX):
            names = self.names[start : start + _BATCHES_MAX]
            offsets = self.offsets[start : start + _BATCHES_MAX]
            yield _LAYOUT.pack(_VERSION, len(names)) + names.tobytes() + offsets.tobytes()

    def decode(self, payload: bytes) -> None:
        """Add the content of a `MOVED` frame.

        Raises:
            MalformedFrameError: the payload has a version that this release does not know.
        """
        version, count = _LAYOUT.unpack_from(payload)
        if version != _VERSION or len(payload) != _LAYOUT.size + 16 * count:
            raise MalformedFrameError(f"moved batches of version {version}")
        middle = _LAYOUT.size + 8 * count
        self.names.frombytes(payload[_LAYOUT.size : middle])
        self.offsets.frombytes(payload[middle:])


def _packed(name: Location) -> int:
    return name.segment << 32 | name.offset


class MovedFrames:
    """Maps names of moved batches to locations, and locations in a file to names."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        """The first segment of the file that holds a rewritten segment, by segment."""
        self._places: dict[int, Places] = {}

    def place(self, name: Location) -> tuple[int, int] | None:
        """Return the file (its first segment) and the offset of a payload; None: the payload is
        gone.
        """
        if (file := self._files.get(name.segment)) is None:
            return name.segment, name.offset
        places, wanted = self._places[file], _packed(name)
        index = bisect_left(places.names, wanted)
        if index == len(places.names) or places.names[index] != wanted:
            return None
        return file, places.offsets[index]

    def places(
        self, segments: NDArray[np.uint32], offsets: NDArray[np.uint64]
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
        """Return the same as `place` for many payloads. File 0: the payload is gone."""
        files, now = segments.copy(), offsets.copy()
        moved: defaultdict[int, list[int]] = defaultdict(list)
        for segment in np.unique(segments).tolist():
            if (file := self._files.get(segment)) is not None:
                moved[file].append(segment)
        for file, of_file in moved.items():
            rows = np.flatnonzero(np.isin(segments, of_file))
            wanted = segments[rows].astype(np.uint64) << np.uint64(32) | offsets[rows]
            names = np.frombuffer(self._places[file].names, np.uint64)
            at = np.searchsorted(names, wanted)
            found = at < len(names)
            found[found] = names[at[found]] == wanted[found]
            files[rows] = np.where(found, np.uint32(file), np.uint32(0))
            now[rows[found]] = np.frombuffer(self._places[file].offsets, np.uint64)[at[found]]
        return files, now

    def has_moved(self, segment: int) -> bool:
        """Tell whether a segment was rewritten, in this incarnation or an earlier one."""
        return segment in self._files

    def name(self, file: int, offset: int, length: int) -> Location | None:
        """Return the name of the batch at `offset` of a file, with the batch's current length.
        None: the file was rewritten, and its `MOVED` frame with the name is damaged.
        """
        if (places := self._places.get(file)) is None:
            return Location(file, offset, length)
        index = bisect_left(places.offsets, offset)
        if index == len(places.offsets) or places.offsets[index] != offset:
            return None
        packed = places.names[index]
        return Location(packed >> 32, packed & (1 << 32) - 1, length)

    def moved(self, segments: Iterable[int], file: int, places: Places) -> None:
        """Note a rewrite: `file` (its first segment) now holds the remaining frames of
        `segments`.
        """
        for segment in segments:
            self._places.pop(segment, None)
            self._files[segment] = file
        self._places[file] = places
