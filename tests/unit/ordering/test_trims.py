"""Trims at the primary (PITFALLS A22), through its sequencer role."""

from __future__ import annotations

from indilog.base.ids import Epoch, Instant, MetalogPosition, NodeId, SeqNum, ShardId
from indilog.config import Config, node_config
from indilog.kernel.metalog import Entry, Floor, Trim, decode_entry
from indilog.kernel.view import view_of
from indilog.roles.role import (
    Effect,
    Event,
    FrameKind,
    Ignore,
    Location,
    Persist,
    Persisted,
    Received,
    Send,
)
from indilog.wire.messages import (
    MetalogEntries,
    MetalogWanted,
    ShardProgress,
)
from indilog.wire.tag_messages import TrimIs, TrimWanted
from indilog_ordering.sequencer import Sequencer
from indilog_ordering.trims import TrimRequests
from tests.support.metalog_messages import started, with_writers

PRIMARY, STORAGE, ENGINE = NodeId("sequencer-0"), NodeId("storage-0"), NodeId("engine-0")
T0 = Instant(1000.0)
NOWHERE = Location(0, 0, 0)


class Alone:
    """A primary without backups, on a disk that survives restarts."""

    def __init__(self, disk: list[bytes] | None = None, epoch: int = 1, **node: int) -> None:
        self.disk = list(disk or [])
        config = Config(node=node_config(**node))
        self.role = Sequencer(PRIMARY, [view_of()], config)
        self.role.restore(with_writers({ShardId(0): Epoch(1)}), ())
        for payload in self.disk:
            self.role.recover(FrameKind.METALOG, payload, NOWHERE)
        self.turn(*started(epoch))

    def turn(self, *events: Event) -> list[Effect]:
        """Deliver events; confirm each write at once."""
        done: list[Effect] = []
        pending = list(events)
        while True:
            effects = self.role.handle(pending, T0)
            self.role.check_invariants()
            done += effects
            pending = [Persisted(e.token, NOWHERE) for e in effects if isinstance(e, Persist)]
            self.disk += [e.payload for e in effects if isinstance(e, Persist)]
            if not pending:
                return done

    def order(self, stored: int) -> None:
        report = ShardProgress(self.role._leadership.term, {ShardId(0): (Epoch(1), stored)})
        self.turn(Received(STORAGE, report, Epoch(1)))

    def trim(self, request: int, *floor: int, of_log: bool = True) -> list[TrimIs]:
        wanted = TrimWanted(request, Floor(floor[0], floor[1], of_log))
        effects = self.turn(Received(ENGINE, wanted, Epoch(1)))
        return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, TrimIs)]

    def entries(self) -> list[Entry]:
        return [decode_entry(payload) for payload in self.disk]


def test_a_trim_is_an_entry_and_is_answered_when_it_is_committed() -> None:
    primary = Alone()
    primary.order(10)
    assert primary.trim(1, 7, 5) == [TrimIs(1, 2, 10)]
    (_, trim) = primary.entries()
    assert isinstance(trim, Trim)
    assert (trim.position, trim.number, trim.floors) == (1, 0, (Floor(7, 5, of_log=True),))


def test_trims_of_one_iteration_share_an_entry_with_the_highest_floor_of_each_tag() -> None:
    primary = Alone()
    primary.order(10)
    wanted = [(1, 7, 5), (2, 7, 6), (3, 8, 2)]
    effects = primary.turn(
        *(
            Received(ENGINE, TrimWanted(r, Floor(t, u, of_log=False)), Epoch(1))
            for r, t, u in wanted
        )
    )
    reported = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, TrimIs)]
    assert reported == [TrimIs(request, 2, 10) for request in (1, 2, 3)]
    trim = primary.entries()[-1]
    assert isinstance(trim, Trim)
    assert trim.floors == (Floor(7, 6, of_log=False), Floor(8, 2, of_log=False))


def test_a_repeated_request_makes_no_second_entry() -> None:
    primary = Alone()
    primary.order(10)
    first = primary.trim(1, 7, 5)
    assert primary.trim(1, 7, 5) == first
    assert len(primary.entries()) == 2


def test_trimming_beyond_the_tail_is_refused_and_makes_no_entry() -> None:
    primary = Alone()
    primary.order(10)
    assert primary.trim(1, 7, 11) == [TrimIs(1, None, 10)]
    assert len(primary.entries()) == 1
    assert primary.trim(2, 7, 10) == [TrimIs(2, 2, 10)]


def test_numbers_of_trims_continue_after_a_restart() -> None:
    primary = Alone()
    primary.order(10)
    primary.trim(1, 7, 5)
    again = Alone(primary.disk, epoch=2)
    again.trim(1, 7, 6)
    trim = again.entries()[-1]
    assert isinstance(trim, Trim)
    assert trim.number == 1


def test_a_trim_is_published_to_storage_and_engines() -> None:
    primary = Alone()
    primary.order(10)
    primary.trim(1, 7, 5)
    effects = primary.turn(Received(STORAGE, MetalogWanted(1, Epoch(1)), Epoch(1)))
    (page,) = [e.message for e in effects if isinstance(e, Send)]
    assert isinstance(page, MetalogEntries)
    assert page.entries == (primary.entries()[1],)


def test_trims_beyond_the_limit_in_flight_are_ignored() -> None:
    primary = Alone(trims_pending_max=2)
    primary.order(10)
    wanted = (TrimWanted(r, Floor(r, 1, of_log=True)) for r in range(3))
    effects = primary.turn(*(Received(ENGINE, message, Epoch(1)) for message in wanted))
    assert [e.reason for e in effects if isinstance(e, Ignore)] == ["too many trims are under way"]
    assert sum(isinstance(e, Send) and isinstance(e.message, TrimIs) for e in effects) == 2


def test_requests_in_uncommitted_entries_count_towards_the_limit() -> None:
    requests, tail = TrimRequests(requests_max=2), SeqNum(10)
    wanted = [TrimWanted(request, Floor(request, 1, of_log=True)) for request in range(3)]
    assert requests.on_wanted(ENGINE, wanted[0], tail) == []
    requests.propose(MetalogPosition(0))
    assert requests.on_wanted(ENGINE, wanted[1], tail) == []
    assert requests.on_wanted(ENGINE, wanted[2], tail) is None
    requests.commit(MetalogPosition(1), tail)
    assert requests.on_wanted(ENGINE, wanted[2], tail) == []
    requests.check_invariants()
