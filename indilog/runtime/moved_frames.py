"""Where record batches are whose segments were rewritten in this life (decision 0016).

A role knows a batch by the place at which it was written or recovered. That stays its name: what a
rewrite moves is looked up here, so nobody has to be told. 16 bytes a batch that was moved.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

from indilog.roles import Location


class Places:
    """The batches of one rewritten file, in order: their names, and where they are in it."""

    __slots__ = ("names", "offsets")

    def __init__(self) -> None:
        self.names = array("Q")
        """Segment and offset of each, as one number; ascending."""
        self.offsets = array("Q")

    def add(self, name: Location, offset: int) -> None:
        """Note that the batch called `name` comes next, at `offset`."""
        self.names.append(_packed(name))
        self.offsets.append(offset)


def _packed(name: Location) -> int:
    return name.segment << 32 | name.offset


class MovedFrames:
    """Finds them by name, and the names of those in a file."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        """Segments that were rewritten, with the first segment of the file that has them."""
        self._places: dict[int, Places] = {}

    def place(self, name: Location) -> tuple[int, int] | None:
        """Return file (by its first segment) and offset of a payload; None: it is gone."""
        if (file := self._files.get(name.segment)) is None:
            return name.segment, name.offset
        places, wanted = self._places[file], _packed(name)
        index = bisect_left(places.names, wanted)
        if index == len(places.names) or places.names[index] != wanted:
            return None
        return file, places.offsets[index]

    def has_moved(self, segment: int) -> bool:
        """Whether a segment was rewritten in this life."""
        return segment in self._files

    def name(self, file: int, offset: int, length: int) -> Location:
        """Return the name of the batch at `offset` of a file; its length is that of now."""
        if (places := self._places.get(file)) is None:
            return Location(file, offset, length)
        packed = places.names[bisect_left(places.offsets, offset)]
        return Location(packed >> 32, packed & (1 << 32) - 1, length)

    def moved(self, segments: Iterable[int], file: int, places: Places) -> None:
        """Note that what is left of these segments is in one file now."""
        for segment in segments:
            self._places.pop(segment, None)
            self._files[segment] = file
        self._places[file] = places
