"""A primary that lacks entries, through its sequencer role (A5)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from indilog.base.errors import DataLossError
from indilog.base.ids import Epoch, Instant, NodeId, ShardId, ViewNumber
from indilog.config import Config, node_config
from indilog.kernel.lineage import Extent
from indilog.kernel.metalog import Base, NewRecords, entry_encoded
from indilog.kernel.view import view_of
from indilog.roles.role import (
    Effect,
    FrameKind,
    Ignore,
    Location,
    Lost,
    Persist,
    Persisted,
    Received,
    Send,
    Started,
)
from indilog.wire.messages import Message, MetalogEntries, ShardProgress, TailWanted
from indilog.wire.sequencer_messages import MetalogAppend, MetalogCopy, MetalogCopyWanted
from indilog_ordering.metalog_state import state_decoded
from indilog_ordering.sequencer import Sequencer

PRIMARY, FIRST, SECOND = (NodeId(f"sequencer-{i}") for i in range(3))
ENGINE = NodeId("engine-0")
NOWHERE = Location(0, 0, 0)
T0 = Instant(1000.0)
LIFE = Epoch(9)
CONFIG = Config(node=node_config(resend_s=1.0, metalog_entries_in_flight_max=2))


def entry(position: int, *, epoch: int = 1) -> NewRecords:
    return NewRecords(position, ViewNumber(1), Epoch(epoch), {ShardId(0): position + 1})


def entries(*epochs: int) -> list[NewRecords]:
    return [entry(position, epoch=epoch) for position, epoch in enumerate(epochs)]


class Disk:
    """The disk of the primary, and its role."""

    def __init__(self, *frames: NewRecords | None) -> None:
        self.frames: list[tuple[FrameKind, bytes] | None] = [
            (FrameKind.METALOG, entry_encoded(frame)) if frame is not None else None
            for frame in frames
        ]
        """None: a frame that cannot be read."""
        self.unsynced: list[Persist] = []
        self.start()

    def start(self) -> list[Effect]:
        self.node = Sequencer(PRIMARY, [view_of(sequencers=3)], CONFIG)
        if not self.frames:
            self.node.lost(Lost(None, b"", NOWHERE))
        for frame in self.frames:
            if frame is None:
                self.node.lost(Lost(FrameKind.METALOG, b"", NOWHERE))
            else:
                self.node.recover(*frame, NOWHERE)
        self.node.recovered()
        self.started = self.handle(Started(LIFE))
        return self.started

    def handle(self, *events: Started | Received | Persisted, at: float = 0.0) -> list[Effect]:
        """Deliver events; confirm all writes before returning."""
        effects = self.node.handle(events, Instant(T0 + at))
        self.node.check_invariants()
        written = [effect for effect in effects if isinstance(effect, Persist)]
        self.frames += [(persist.kind, persist.payload) for persist in written]
        if written:
            effects += self.handle(*(Persisted(persist.token, NOWHERE) for persist in written))
        return effects

    def reported(self, sender: NodeId, message: Message, *, at: float = 0.0) -> list[Effect]:
        return self.handle(Received(sender, message, Epoch(1)), at=at)

    def kinds(self) -> list[FrameKind]:
        return [frame[0] for frame in self.frames if frame is not None]


def copy(
    of: Sequence[NewRecords],
    start: int = 0,
    anchor: int | None = None,
    *,
    end: int | None = None,
    whole: bool = True,
    asked: int = LIFE,
) -> MetalogCopy:
    """The answer of a backup with these entries."""
    wanted = tuple(of[start : anchor + 1 if end is None else end]) if anchor is not None else ()
    return MetalogCopy(
        Epoch(asked),
        whole,
        of[-1].epoch if of else Epoch(0),
        len(of),
        start,
        of[start - 1].epoch if 0 < start <= len(of) else Epoch(0),
        anchor,
        of[anchor].epoch if anchor is not None and anchor < len(of) else Epoch(0),
        wanted,
    )


def questions(effects: Sequence[Effect]) -> list[tuple[NodeId, MetalogCopyWanted]]:
    return [
        (e.to, e.message)
        for e in effects
        if isinstance(e, Send) and isinstance(e.message, MetalogCopyWanted)
    ]


def kinds_sent(effects: Sequence[Effect]) -> set[type]:
    return {type(effect.message) for effect in effects if isinstance(effect, Send)}


def metalog(disk: Disk) -> list[object]:
    return [disk.node._metalog[position] for position in range(disk.node.length)]


# --- the end of the metalog is unknown


def test_a_wiped_primary_asks_all_backups_and_sends_nothing_else() -> None:
    disk = Disk()
    wanted = MetalogCopyWanted(LIFE, 0, None)
    assert questions(disk.started) == [(FIRST, wanted), (SECOND, wanted)]
    progress = ShardProgress({ShardId(0): (Epoch(1), 5)})
    assert disk.reported(NodeId("storage-0"), progress) == []
    assert disk.reported(ENGINE, TailWanted(1)) == []
    assert not disk.node.ready
    assert disk.node.status() == {"length": 0, "committed": 0, "whole": 0, "base": 0}


def test_one_backup_is_not_enough_for_a_wiped_primary() -> None:
    """Published entries may be on the other backup only."""
    disk = Disk()
    assert list(disk.node.silent) == [FIRST, SECOND]
    assert questions(disk.reported(FIRST, copy(entries(1, 1)))) == []
    assert list(disk.node.silent) == [SECOND]
    for seconds in (0.5, 1.0, 2.0):
        effects = disk.handle(at=seconds)
        assert kinds_sent(effects) <= {MetalogCopyWanted}
    assert not disk.node.ready


def test_a_wiped_primary_takes_the_copy_of_the_greatest_extent_in_pages() -> None:
    disk = Disk()
    longest = entries(1, 1, 2, 2, 2)
    disk.reported(FIRST, copy(entries(1, 1, 1, 1, 1, 1, 1)))
    asked = questions(disk.reported(SECOND, copy(longest)))
    assert asked == [(SECOND, MetalogCopyWanted(LIFE, 0, 4))], "newer, though shorter"
    asked = questions(disk.reported(SECOND, copy(longest, 0, 4, end=2)))
    assert asked == [(SECOND, MetalogCopyWanted(LIFE, 2, 4))]
    asked = questions(disk.reported(SECOND, copy(longest, 2, 4, end=4)))
    assert asked == [(SECOND, MetalogCopyWanted(LIFE, 4, 4))]
    effects = disk.reported(SECOND, copy(longest, 4, 4))
    assert disk.node.ready
    assert metalog(disk) == longest
    assert MetalogAppend in kinds_sent(effects), "the primary orders again"
    assert disk.kinds() == [
        FrameKind.METALOG_STATE,
        *[FrameKind.METALOG_FETCHED] * 5,
        FrameKind.METALOG_STATE,
    ]
    disk.start()
    assert disk.node.ready, "a restart keeps this"
    assert metalog(disk) == longest


def test_a_primary_that_was_wiped_before_its_first_entry_starts_at_position_0() -> None:
    disk = Disk()
    disk.reported(FIRST, copy([]))
    disk.reported(SECOND, copy([]))
    assert disk.node.ready
    disk.start()
    assert disk.node.ready


def test_a_crash_during_the_fetch_restarts_it() -> None:
    disk, longest = Disk(), entries(1, 1, 1, 1)
    disk.reported(FIRST, copy(longest))
    disk.reported(SECOND, copy(longest))
    disk.reported(FIRST, copy(longest, 0, 3, end=2))
    assert disk.node.length == 2
    disk.start()
    assert not disk.node.ready
    assert questions(disk.started)[0] == (FIRST, MetalogCopyWanted(LIFE, 2, None))
    disk.reported(FIRST, copy(longest, 2))
    disk.reported(SECOND, copy(longest, 2))
    disk.reported(FIRST, copy(longest, 2, 3))
    assert metalog(disk) == longest
    assert disk.node.ready


def test_a_damaged_end_is_fetched_after_the_intact_entries() -> None:
    disk, all_of_it = Disk(entry(0), entry(1), None), entries(1, 1, 1)
    assert questions(disk.started)[0] == (FIRST, MetalogCopyWanted(LIFE, 2, None))
    disk.reported(FIRST, copy(entries(1, 1), 2))
    disk.reported(SECOND, copy(all_of_it, 2))
    disk.reported(SECOND, copy(all_of_it, 2, 2))
    assert metalog(disk) == all_of_it
    disk.start()
    assert disk.node.ready
    assert metalog(disk) == all_of_it


def test_entries_of_a_damaged_end_that_no_backup_has_were_never_published() -> None:
    disk = Disk(entry(0), entry(1), None)
    disk.reported(FIRST, copy(entries(1), 2))
    disk.reported(SECOND, copy(entries(1, 1), 2))
    assert disk.node.ready
    assert disk.node.length == 2
    frame = disk.frames[-1]
    assert frame is not None
    assert state_decoded(frame[1]).extent == Extent(Epoch(1), 2)
    disk.start()
    assert disk.node.ready


def test_entries_replaced_by_a_newer_incarnation_are_fetched_again() -> None:
    """The damage lost the replacements."""
    disk = Disk(*entries(1, 2, 2), None)
    newer = entries(1, 3)
    disk.reported(FIRST, copy(newer, 3))
    asked = questions(disk.reported(SECOND, copy(newer, 3)))
    assert asked == [(FIRST, MetalogCopyWanted(LIFE, 3, 1))]
    asked = questions(disk.reported(FIRST, copy(newer, 3, 1)))
    assert asked == [(FIRST, MetalogCopyWanted(LIFE, 1, 1))]
    disk.reported(FIRST, copy(newer, 1, 1))
    assert metalog(disk) == newer
    disk.start()
    assert disk.node.ready
    assert metalog(disk) == newer


@pytest.mark.parametrize("lacking", [FIRST, SECOND])
def test_entries_lost_by_primary_and_backup_are_one_sentence(lacking: NodeId) -> None:
    disk = Disk()
    (other,) = {FIRST, SECOND} - {lacking}
    disk.reported(lacking, copy(entries(1), whole=False))
    with pytest.raises(
        DataLossError, match=f"on the disk of sequencer-0, and on that of {lacking} too"
    ):
        disk.reported(other, copy(entries(1, 1)))


# --- a hole


def test_a_hole_is_filled_from_any_backup_that_has_the_entry_after_it() -> None:
    """The backup may lack other entries: up to that entry its copy equals this one."""
    mine = entries(1, 1, 1, 1, 2)
    disk = Disk(mine[0], None, None, *mine[3:])
    assert questions(disk.started) == [
        (FIRST, MetalogCopyWanted(LIFE, 1, 3)),
        (SECOND, MetalogCopyWanted(LIFE, 1, 3)),
    ]
    asked = questions(disk.reported(SECOND, copy(mine[:4], 1, 3, end=2, whole=False)))
    assert asked == [(SECOND, MetalogCopyWanted(LIFE, 2, 3))]
    disk.reported(SECOND, copy(mine[:4], 2, 3, whole=False))
    assert disk.node.ready
    assert metalog(disk) == mine
    assert disk.kinds()[-2:] == [FrameKind.METALOG_FILLED] * 2
    disk.start()
    assert disk.node.ready
    assert metalog(disk) == mine


def test_holes_are_filled_one_after_the_other() -> None:
    mine = entries(1, 1, 1, 1, 1)
    disk = Disk(None, mine[1], None, None, mine[4])
    asked = questions(disk.reported(FIRST, copy(mine, 0, 1)))
    assert {question for _, question in asked} == {MetalogCopyWanted(LIFE, 2, 4)}
    disk.reported(FIRST, copy(mine, 2, 4))
    assert disk.node.ready
    assert metalog(disk) == mine


def test_a_copy_of_another_incarnation_fills_no_hole() -> None:
    mine = entries(1, 1, 2, 2)
    disk = Disk(mine[0], None, *mine[2:])
    disk.reported(FIRST, copy(entries(1, 1, 1, 1), 1, 2))
    assert disk.node.length == 1
    disk.reported(SECOND, copy(mine, 1, 2))
    assert metalog(disk) == mine


def test_entries_after_a_hole_that_no_backup_reaches_were_never_published() -> None:
    mine = entries(1, 1, 1, 1)
    disk = Disk(mine[0], None, *mine[2:])
    disk.reported(FIRST, copy(mine[:1], 1, 2))
    assert disk.node.length == 1
    asked = questions(disk.reported(SECOND, copy(mine[:2], 1, 2)))
    assert asked == [(SECOND, MetalogCopyWanted(LIFE, 1, 1))]
    disk.reported(SECOND, copy(mine[:2], 1, 1))
    assert metalog(disk) == mine[:2]
    disk.start()
    assert disk.node.ready
    assert metalog(disk) == mine[:2]


def based(of: Sequence[NewRecords], wanted: MetalogCopyWanted, base: int) -> MetalogCopy:
    """What a backup answers whose base stands for the first `base` of these entries."""
    anchor = wanted.anchor
    start = max(wanted.start, base)
    has = anchor is not None and base <= anchor + 1 <= len(of)
    return MetalogCopy(
        LIFE,
        True,
        of[-1].epoch,
        len(of),
        start,
        of[start - 1].epoch,
        anchor,
        of[anchor].epoch if has and anchor is not None else Epoch(0),
        tuple(of[start : anchor + 1]) if has and anchor is not None else (),
        Base().with_entries(of[:base]) if wanted.start < base else None,
    )


@pytest.mark.parametrize("lost", [(1,), (1, 3), (1, 3, 4)])
def test_a_hole_is_filled_by_a_base_that_covers_it_and_later_entries(
    lost: tuple[int, ...],
) -> None:
    """The other backup was wiped; it is not whole, and has nothing of it."""
    mine = entries(1, 1, 1, 1, 1, 2, 2)
    disk = Disk(*(None if at in lost else found for at, found in enumerate(mine)))
    for _ in range(3):
        for _, question in questions(disk.handle(at=2.0)) or questions(disk.started):
            disk.reported(SECOND, copy(mine[:1], 1, question.anchor, end=1, whole=False))
            disk.reported(FIRST, based(mine, question, 4))
    assert disk.node.ready
    assert disk.node._metalog.base == Base().with_entries(mine[:4])
    assert [disk.node._metalog[at] for at in (4, 5, 6)] == mine[4:]
    disk.start()
    assert disk.node.ready, "the same after a restart"
    assert disk.node.length == len(mine)
    disk.frames[len(mine) - 1] = None
    disk.start()
    assert not disk.node.ready, "the base does not cover a frame that was lost before it"


def test_a_hole_that_only_a_damaged_backup_might_fill_is_one_sentence() -> None:
    mine = entries(1, 1, 1)
    disk = Disk(mine[0], None, mine[2])
    disk.reported(FIRST, copy([], 1, 2, whole=False))
    with pytest.raises(DataLossError, match="restore the whole data directory"):
        disk.reported(SECOND, copy(mine[:2], 1, 2))


def test_damage_after_a_filled_hole_is_not_the_end_of_the_metalog() -> None:
    """The fill is written after the last entry, and does not show whether more entries followed."""
    mine = entries(1, 1, 1)
    disk = Disk(mine[0], None, mine[2])
    disk.reported(FIRST, copy(mine, 1, 2))
    assert metalog(disk) == mine
    disk.frames[2] = None
    disk.start()
    assert not disk.node.ready


# --- messages


@pytest.mark.parametrize(
    ("sender", "message"),
    [
        (ENGINE, copy(entries(1))),
        (FIRST, copy(entries(1), asked=8)),
        (FIRST, copy(entries(9))),
        (FIRST, MetalogCopy(LIFE, True, Epoch(1), -1, 0, Epoch(0), None, Epoch(0), ())),
        (FIRST, MetalogCopy(LIFE, True, Epoch(1), 1, -1, Epoch(0), None, Epoch(0), ())),
        (FIRST, MetalogCopy(LIFE, True, Epoch(1), 2, 0, Epoch(0), 1, Epoch(1), (entry(1),))),
        (FIRST, MetalogCopy(LIFE, True, Epoch(2), 2, 1, Epoch(2), 1, Epoch(2), (entry(1),))),
        (FIRST, MetalogEntries(0, Epoch(0), (), 0)),
    ],
)
def test_an_impossible_message_is_ignored_and_changes_nothing(
    sender: NodeId, message: Message
) -> None:
    disk = Disk()
    assert [type(effect) for effect in disk.reported(sender, message)] == [Ignore]
    assert disk.node.length == 0


def test_unanswered_questions_are_resent() -> None:
    disk = Disk()
    assert disk.node.deadline() == T0 + 1.0
    assert disk.handle(at=0.9) == []
    assert len(questions(disk.handle(at=1.0))) == 2
