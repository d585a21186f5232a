"""The floors of logs and tags that an engine knows (ARCHITECTURE 13).

The floor of a log applies to all its tags; a single tag may have a higher floor.

A read by a tag does not need the floor of the tag, because the Tag Cache drops trimmed records, and
the index tier knows all floors of tags. A read of a whole log needs floors of tags: it must skip a
cached record if all tags of the record were trimmed later. So the engine also keeps floors of tags.

An engine gets every trim from the metalog, except the trims before it joined. It may also drop
floors for lack of room. If the known floor of a log is not *exact*, the true floor may be higher,
but not above the *horizon*. A read that depends on an inexact floor asks the index tier, whose
answer makes the floor exact. `Engine`, `LocalReads` and `Reads` call `LogFloors`.
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
    """The floors of at most `floors_max` logs and at most `floors_max` tags.

    If there are more, the floor that rose longest ago is dropped.

    Attributes:
        horizon: a seqnum; every floor of a log above this seqnum is known.
    """

    __slots__ = (
        "_ahead", "_floors", "_floors_max", "_tag_floors", "_tags_below", "_tags_forgotten",
        "horizon",
    )  # fmt: skip

    def __init__(self, floors_max: int) -> None:
        self._floors_max = floors_max
        self._floors: dict[TagHash, tuple[SeqNum, bool]] = {}
        self._ahead: deque[tuple[MetalogPosition, Floor]] = deque()
        """Floors of trims whose positions the Tag Cache has not applied yet."""
        self.horizon: SeqNum = 0
        self._tag_floors: dict[TagHash, SeqNum] = {}
        self._tags_below: SeqNum = 0
        """The highest floor of a tag that was trimmed since this node joined; 0: there is none."""
        self._tags_forgotten: SeqNum = 0
        """The highest dropped floor of a tag; 0: none was dropped."""

    def __len__(self) -> int:
        return len(self._floors)

    def joined(self, tail: SeqNum, trims: int) -> None:
        """Begin at `tail`; `trims` is the number of earlier trims, whose floors are not known."""
        self.horizon = tail if trims else 0

    def may_be_dead(self, seqnum: SeqNum, names: bytes) -> bool:
        """Whether all tags of a record with `names` may be trimmed at `seqnum`. The record was read
        after this node joined.

        Only the floor of its log makes a record without tags dead.
        """
        if seqnum >= self._tags_below:
            return False
        tags = tag_hashes_in(names)
        return bool(tags) and all(seqnum < self._tag_floor(tag) for tag in tags)

    def may_be_trimmed(self, seqnum: SeqNum, tag: TagHash) -> bool:
        """Whether the floor of `tag` may be above `seqnum`, at which there is a record of `tag`."""
        return seqnum < max(self._tag_floor(tag), self.horizon)

    def _tag_floor(self, tag: TagHash) -> SeqNum:
        """Return an upper bound of the floor that trims since this node joined gave the tag."""
        return max(self._tag_floors.get(tag, 0), self._tags_forgotten)

    def _raise_tag(self, floor: Floor) -> None:
        floors = self._tag_floors
        floors[floor.tag] = max(floors.pop(floor.tag, 0), floor.until)
        self._tags_below = max(self._tags_below, floor.until)
        if len(floors) > self._floors_max:
            self._tags_forgotten = max(self._tags_forgotten, floors.pop(next(iter(floors))))

    def apply(self, trim: Trim) -> None:
        """Note the floors of `trim`, an entry of the metalog."""
        assert not self._ahead or self._ahead[-1][0] < trim.position, "trims are applied in order"
        for floor in trim.floors:
            self._ahead.append((trim.position, floor))
            if floor.of_log:
                self._raise(floor)
            else:
                self._raise_tag(floor)

    def pop_reached(self, position: MetalogPosition) -> list[Floor]:
        """Remove and return the floors of the trims up to `position`; the Tag Cache has applied the
        index data of that position.
        """
        reached: list[Floor] = []
        while self._ahead and self._ahead[0][0] <= position:
            reached.append(self._ahead.popleft()[1])
        return reached

    def _raise(self, floor: Floor) -> None:
        known, exact = self._floors.pop(floor.tag, (0, False))
        self._put(floor.tag, max(known, floor.until), exact=exact)

    def learn(self, log: TagHash, until: SeqNum) -> None:
        """Note `until`, the floor of `log` that the index tier answered. The known floor of the log
        is then exact.
        """
        if log and self.horizon:
            known, _ = self._floors.pop(log, (0, False))
            self._put(log, max(known, until), exact=True)

    def _put(self, log: TagHash, until: SeqNum, *, exact: bool) -> None:
        assert log not in self._floors, "the caller has removed the log, so it becomes the newest"
        self._floors[log] = until, exact
        if len(self._floors) > self._floors_max:
            forgotten, _ = self._floors.pop(next(iter(self._floors)))
            self.horizon = max(self.horizon, forgotten)

    def floor_of(self, log: TagHash, seqnum: SeqNum) -> SeqNum | None:
        """Return the known floor of a log if it shows whether `seqnum` is trimmed; None: the known
        floor does not show this.
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
        """Whether the floor of the log permits the local answer `found` (None: no record).

        False: the index tier must be asked, for one of three reasons:

        - This node does not know the floor exactly enough.
        - The bound is trimmed, and the floor of the tag may be higher than the floor of the log.
        - Index data from before a trim is not applied yet, and may have a record above the floor.

        Raises:
            TrimmedError: the floor is above the bound, or above the record that `read_prev` found.
        """
        floor = self.floor_of(log, bound)
        if floor is not None and bound >= floor and direction is Direction.PREV and found != bound:
            bound = found or 0
            floor = self.floor_of(log, bound)
            if floor is not None and bound < floor and self._ahead:
                return False  # index data from before the trim may have a record above the floor
        if floor is None or (bound < floor and tag not in (EMPTY_TAG, log)):
            return False
        if bound < floor:
            raise TrimmedError(floor)
        return True

    def check_invariants(self) -> None:
        """Assert the limits, and that no floor of a tag lies above `_tags_below`."""
        assert len(self._floors) <= self._floors_max, "more floors of logs than allowed"
        assert len(self._tag_floors) <= self._floors_max, "more floors of tags than allowed"
        assert self._tags_forgotten <= self._tags_below, "a dropped floor was known before"
        assert all(floor <= self._tags_below for floor in self._tag_floors.values())
        positions = [position for position, _ in self._ahead]
        assert positions == sorted(positions), "trims wait in the order of the metalog"
