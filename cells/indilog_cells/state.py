"""The state of a logspace over cells: what follows from its cells, in order.

A logspace has the records of several named logs, in one order. `LogState.apply` is deterministic:
every process that applies the same cells has the same state. So seqnums, conditions, floors and
times need no agreement besides the order of the cells. Seqnums are dense: junk cells, void cells
and appends whose condition fails take none.

`core` calls `apply` for one cell after another. `index` is the part of the state that finds
records, in generations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias, assert_never

import msgspec

from indilog.base.errors import MalformedFrameError
from indilog.base.ids import SeqNum, TagHash, unpack_tags
from indilog.base.retention import Retention
from indilog_cells.content import (
    AskTime,
    Condition,
    Content,
    End,
    Item,
    Policy,
    Records,
    TrimBelow,
    opened,
    sealed,
)
from indilog_cells.index import (
    GENERATION_LIMITS,
    GenerationInfo,
    GenerationLimits,
    OpenGeneration,
    closed,
)

_MAGIC: Final = b"ILCK"
_VERSION: Final = 2
"""Version 2 has `is_ended`."""
_VERSION_MIN: Final = 1


class Placed(NamedTuple):
    """Records were appended, from seqnum `first` on."""

    first: SeqNum


class Contradicted(NamedTuple):
    """A condition does not hold: the record at `last` has its tag. Nothing was appended."""

    last: SeqNum


class BelowFloor(NamedTuple):
    """A trimmed record may contradict a condition; nothing was appended."""

    floor: SeqNum


class CheckedTooEarly(NamedTuple):
    """The writer checked a condition before the open generation began. Records since then may be in
    closed generations, whose tags are not in memory. Nothing was appended; the writer checks again.
    """


class Ended(NamedTuple):
    """The log ended before; nothing was appended, and nothing ever will be."""


class Applied(NamedTuple):
    """An item other than records took effect, at this time of the log (microseconds since 1970)."""

    time_us: int


Outcome: TypeAlias = Placed | Contradicted | BelowFloor | CheckedTooEarly | Ended | Applied


class Closed(NamedTuple):
    """A generation was closed.

    Attributes:
        info, generation: the generation, and its bytes for the store.
        checkpoint: the state at its end.
        has_trimmed: whether the state dropped earlier generations, because all of their records
            are trimmed.
    """

    info: GenerationInfo
    generation: bytes
    checkpoint: bytes
    has_trimmed: bool


class _Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """The state at the end of a generation, as stored."""

    position: int
    tail: SeqNum
    time_us: int
    epoch: int
    generations: list[GenerationInfo]
    floors: dict[TagHash, SeqNum]
    log_floors: dict[TagHash, SeqNum]
    policies: dict[str, tuple[float | None, int | None]]
    is_ended: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Checkpoint)


class LogState:
    """What follows from the cells below `position`.

    Args:
        limits: when generations are closed.

    Attributes:
        position: the first cell that is not applied.
        tail: the first seqnum that is not assigned.
        time_us: when the last cell was ordered, microseconds since 1970; never decreases.
        epoch: the greatest epoch of a cell.
        generations: closed generations that are not trimmed, in order.
        open: the open generation.
        floors: floors of sub-streams.
        log_floors: floors of the named logs that had records or were trimmed; 0: not trimmed.
        policies: retention policies that keep less than everything.
        is_ended: whether the log has ended, so that `tail` never grows again.
    """

    def __init__(self, limits: GenerationLimits = GENERATION_LIMITS) -> None:
        self._limits = limits
        self.position = 0
        self.tail: SeqNum = 0
        self.time_us = 0
        self.epoch = 0
        self.generations: list[GenerationInfo] = []
        self.open = OpenGeneration(0, 0)
        self.floors: dict[TagHash, SeqNum] = {}
        self.log_floors: dict[TagHash, SeqNum] = {}
        self.policies: dict[str, Retention] = {}
        self.is_ended = False

    @classmethod
    def restored(cls, checkpoint: bytes, limits: GenerationLimits = GENERATION_LIMITS) -> LogState:
        """Return the state of a checkpoint.

        Raises:
            MalformedFrameError: the bytes are damaged, or of another version.
        """
        try:
            found = _decoder.decode(opened(_MAGIC, _VERSION, checkpoint, oldest=_VERSION_MIN))
        except msgspec.MsgspecError as error:
            raise MalformedFrameError(f"no valid checkpoint: {error}") from error
        state = cls(limits)
        state.position, state.tail = found.position, found.tail
        state.time_us, state.epoch = found.time_us, found.epoch
        state.generations = found.generations
        state.floors, state.log_floors = found.floors, found.log_floors
        state.policies = {log: Retention(*bounds) for log, bounds in found.policies.items()}
        state.is_ended = found.is_ended
        state.open = OpenGeneration(state.position, state.tail)
        return state

    def reopened(self) -> bytes:
        """Return the checkpoint from which this state was restored, without the end of the log."""
        assert not self.open.cells, "a checkpoint is at the end of a generation"
        self.is_ended = False
        return self._checkpoint()

    def _checkpoint(self) -> bytes:
        policies = {log: (kept.age_s, kept.size_bytes) for log, kept in self.policies.items()}
        return sealed(_MAGIC, _VERSION, _encoder.encode(_Checkpoint(
            self.position, self.tail, self.time_us, self.epoch, self.generations, self.floors,
            self.log_floors, policies, self.is_ended,
        )))  # fmt: skip

    def apply(self, content: Content | None) -> list[Outcome] | None:
        """Apply the cell at `position`: a content, or None for junk.

        Return the outcome of each item. None: the cell is void, because a later epoch began in an
        earlier cell; nothing in the void cell took effect.
        """
        outcomes: list[Outcome] | None = []
        if content is not None:
            if content.epoch < self.epoch + content.is_claim:
                outcomes = None
            else:
                self.epoch = content.epoch
                self.time_us = max(self.time_us, content.stamp_us)
                outcomes = self._apply_items(content.items)
        self.position += 1
        self.open.cells += 1
        assert self.open.start + self.open.cells == self.position, "each cell is counted once"
        return outcomes

    def _apply_items(self, items: Sequence[Item]) -> list[Outcome]:
        """Apply the items of the cell at `position`, and add its rows to the cell table
        (`CellTable`).
        """
        outcomes: list[Outcome] = []
        is_row_open = False
        for number, item in enumerate(items):
            before = self.tail
            outcomes.append(self._apply(item))
            if self.tail > before and not is_row_open:
                self.open.table.add(self.position, number, before, self.time_us)
                is_row_open = True
            elif self.tail == before and isinstance(item, Records):
                is_row_open = False
        return outcomes

    def close_generation(self) -> Closed | None:
        """Close the open generation if it is complete; called after each `apply`."""
        if not self.open.is_complete(self._limits):
            return None
        info, stored = closed(self.open, self.position, self.tail)
        alive = self.dead_below
        left = [each for each in self.generations if each.tail > alive]
        assert alive <= self.tail, "no floor is above the tail"
        assert not left or left[-1].end == info.start, "generations are gap-free"
        has_trimmed = len(left) < len(self.generations)
        self.generations = [*left, info]
        self.floors = {tag: floor for tag, floor in self.floors.items() if floor > alive}
        self.open = OpenGeneration(self.position, self.tail)
        return Closed(info, stored, self._checkpoint(), has_trimmed)

    def _apply(self, item: Item) -> Outcome:
        match item:
            case Records():
                return self._place(item)
            case TrimBelow():
                self._raise_floor(item)
            case Policy():
                kept = Retention(item.age_s, item.size_bytes_max)
                if kept.keeps_all:
                    self.policies.pop(item.log, None)
                else:
                    self.policies[item.log] = kept
            case AskTime():
                pass
            case End():
                self.is_ended = True
            case unreachable:
                assert_never(unreachable)
        return Applied(self.time_us)

    def _place(self, records: Records) -> Outcome:
        if self.is_ended:
            return Ended()
        if records.after is not None and (refusal := self._refusal(records.after)) is not None:
            return refusal
        first = self.tail
        for packed in records.tags:
            tags = unpack_tags(packed)
            self.log_floors.setdefault(tags[0], 0)
            self.open.add(self.tail, tags)
            self.tail += 1
        return Placed(first)

    def _refusal(self, after: Condition) -> Outcome | None:
        """Return why a condition does not hold; None: it holds."""
        if after.checked < self.open.first:
            return CheckedTooEarly()
        seqnums = self.open.seqnums(after.tag)
        return contradiction(
            after.known, seqnums[-1] if seqnums else -1, self.floor(after.log, after.tag)
        )

    def _raise_floor(self, item: TrimBelow) -> None:
        until = min(item.until, self.tail)
        floors, key = (self.log_floors, item.log) if item.tag is None else (self.floors, item.tag)
        floors[key] = max(until, floors.get(key, 0))

    def floor(self, log: TagHash, tag: TagHash | None) -> SeqNum:
        """Return the floor of a log; with a tag, that of the sub-stream: its own floor or the
        log's, whichever is greater.
        """
        whole = self.log_floors.get(log, 0)
        return whole if tag is None else max(whole, self.floors.get(tag, 0))

    def is_dead(self, seqnum: SeqNum, tags: bytes) -> bool:
        """Whether a record with these tags is dead: below the floor of its log, or of all its
        tags.
        """
        log, *own = unpack_tags(tags)
        if seqnum < self.log_floors.get(log, 0):
            return True
        return bool(own) and all(seqnum < self.floors.get(tag, 0) for tag in own)

    @property
    def dead_below(self) -> SeqNum:
        """All records below this seqnum are dead: the least floor of all logs."""
        return min(self.log_floors.values(), default=0)


def contradiction(known: int, last: int, floor: SeqNum) -> Contradicted | BelowFloor | None:
    """Return why a condition does not hold; None: it holds.

    Args:
        known: last record with the tag that the caller knows; -1: none.
        last: last record with the tag; -1: none.
        floor: floor of the tag.
    """
    if last > known and last >= floor:
        return Contradicted(last)
    if last < floor and known < floor - 1:
        return BelowFloor(floor)
    return None
