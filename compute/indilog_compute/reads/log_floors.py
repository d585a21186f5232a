"""What an engine knows of trims: the floors of logs, which hold for all their tags, and those of
single tags (ARCHITECTURE 13).

A read by a tag needs no floor of it: the Tag Cache forgets what is trimmed, and the index tier
knows the rest. But a record of the record cache may be dead in all its tags since it was cached.
Reads of a whole log pass over such a record; the floors of its tags tell which one it is.

An engine learns of every trim from the metalog, but not of those before it joined, nor of those
that it forgot for want of room. So there is a *horizon*: the floor of a log that is not *exact* may
be anywhere below it, and what depends on it is asked for in the index tier, whose answers teach it.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from indilog.base.errors import TrimmedError
from indilog.base.ids import EMPTY_TAG, MetalogPosition, SeqNum, TagHash, tag_hashes_in
from indilog.kernel.metalog import Floor, Trim
from indilog.wire.messages import Direction

_NOTHING: Final = (0, False)


class LogFloors:
    """The floors of at most `floors_max` logs, and of as many tags; forgets those that rose longest
    ago.

    Attributes:
        horizon: from here on every floor is known.
    """

    __slots__ = (
        "_ahead", "_floors", "_floors_max", "_tag_floors", "_tags_below", "_tags_forgotten",
        "horizon",
    )  # fmt: skip

    def __init__(self, floors_max: int) -> None:
        self._floors_max = floors_max
        self._floors: dict[TagHash, tuple[SeqNum, bool]] = {}
        self._ahead: deque[tuple[MetalogPosition, Floor]] = deque()
        """What the Tag Cache, which follows the index data, has not come to."""
        self.horizon: SeqNum = 0
        self._tag_floors: dict[TagHash, SeqNum] = {}
        self._tags_below: SeqNum = 0
        """From here on no tag was trimmed since this node joined."""
        self._tags_forgotten: SeqNum = 0
        """From here on all of `_tag_floors` is known."""

    def __len__(self) -> int:
        return len(self._floors)

    def joined(self, tail: SeqNum, trims: int) -> None:
        """Begin in the middle of a log: what was trimmed before is not known, if anything was."""
        self.horizon = tail if trims else 0

    def may_be_dead(self, seqnum: SeqNum, names: bytes) -> bool:
        """Whether a record that was there when this node joined or later, and carries `names`, may
        be trimmed in all its tags now. A record without tags dies with its log only.
        """
        if seqnum >= self._tags_below:
            return False
        tags = tag_hashes_in(names)
        return bool(tags) and all(seqnum < self._tag_floor(tag) for tag in tags)

    def may_be_trimmed(self, seqnum: SeqNum, tag: TagHash) -> bool:
        """Whether a record with `tag` may be trimmed now as one of that tag."""
        return seqnum < max(self._tag_floor(tag), self.horizon)

    def _tag_floor(self, tag: TagHash) -> SeqNum:
        """Return the highest floor that the tag may have got since this node joined."""
        return max(self._tag_floors.get(tag, 0), self._tags_forgotten)

    def _raise_tag(self, floor: Floor) -> None:
        floors = self._tag_floors
        floors[floor.tag] = max(floors.pop(floor.tag, 0), floor.until)
        self._tags_below = max(self._tags_below, floor.until)
        if len(floors) > self._floors_max:
            self._tags_forgotten = max(self._tags_forgotten, floors.pop(next(iter(floors))))

    def heard(self, trim: Trim) -> None:
        """Take in floors from the metalog."""
        for floor in trim.floors:
            self._ahead.append((trim.position, floor))
            if floor.of_log:
                self._raise(floor)
            else:
                self._raise_tag(floor)

    def reached(self, position: MetalogPosition) -> list[Floor]:
        """Take out the floors of trims up to `position`, to which index data is applied now."""
        reached: list[Floor] = []
        while self._ahead and self._ahead[0][0] <= position:
            reached.append(self._ahead.popleft()[1])
        return reached

    def _raise(self, floor: Floor) -> None:
        known, exact = self._floors.pop(floor.tag, (0, False))
        self._put(floor.tag, max(known, floor.until), exact=exact)

    def learned(self, log: TagHash, until: SeqNum) -> None:
        """Take in a floor from the index tier: with what was heard since, it is exact."""
        if log and self.horizon:
            known, _ = self._floors.pop(log, (0, False))
            self._put(log, max(known, until), exact=True)

    def _put(self, log: TagHash, until: SeqNum, *, exact: bool) -> None:
        self._floors[log] = until, exact
        if len(self._floors) > self._floors_max:
            forgotten, _ = self._floors.pop(next(iter(self._floors)))
            self.horizon = max(self.horizon, forgotten)

    def floor_of(self, log: TagHash, seqnum: SeqNum) -> SeqNum | None:
        """Return the floor of a log as far as it matters for `seqnum`.

        None: it is not known whether `seqnum` is below it.
        """
        known, exact = self._floors.get(log, _NOTHING)
        if exact or not log or seqnum < known or seqnum >= self.horizon:
            return known
        return None

    def permit(
        self,
        direction: Direction,
        tag: TagHash,
        log: TagHash,
        bound: SeqNum,
        found: SeqNum | None,
    ) -> bool:
        """Tell whether the log's floor lets the local index answer with `found` (None: nothing).

        False: the index tier is to be asked. The floor is not known well enough here, or the answer
        is "trimmed" and the floor of the tag, which may be higher, is not known; or index data from
        before a trim is not applied, in which there may be a record that is left.

        Raises:
            TrimmedError: the floor is above the bound, or above what was found before it.
        """
        floor = self.floor_of(log, bound)
        if floor is not None and bound >= floor and direction is Direction.PREV and found != bound:
            bound = found or 0
            floor = self.floor_of(log, bound)
            if floor is not None and bound < floor and self._ahead:
                return False  # what is left may be in index data before the trim
        if floor is None or (bound < floor and tag not in (EMPTY_TAG, log)):
            return False
        if bound < floor:
            raise TrimmedError(floor)
        return True
