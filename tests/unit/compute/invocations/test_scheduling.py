"""Which due times become invocations: once each, in order, and what is missed as it was asked."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from indilog.base.deployed import CatchUp, ScheduleSpec
from indilog.config import node_config
from indilog_compute.invocations.checkpoint import NewestCheckpoint
from indilog_compute.invocations.invocation_table import InvocationTable, TableLimits
from indilog_compute.invocations.records import InvocationAccepted, InvocationEnded
from indilog_compute.invocations.scheduling import DeployedSchedule, Schedules

MINUTE = 60.0
START = 1000 * MINUTE
LEASE_S = 6.0


class Clockwork:
    """Two nodes that watch one schedule."""

    def __init__(self, catch_up: CatchUp = "last", *, open_max: int = 100) -> None:
        self.table = InvocationTable(TableLimits(1e9, 1000, 1000, 10**6, 1.0, 4.0))
        self._config = node_config(
            invocation_lease_s=LEASE_S,
            schedule_catch_up_max=5,
            schedule_late_s_max=90.0,
            invocations_open_max=open_max,
        )
        self._seqnums = itertools.count()
        spec = ScheduleSpec("f", "* * * * *", "UTC", catch_up)
        self.scheduled = DeployedSchedule("app.f", spec, START)
        self.first, self.second = self.node(0), self.node(1)

    def node(self, rank: int) -> Schedules:
        schedules = Schedules(lambda: rank, self._config)
        schedules.take([self.scheduled])
        return schedules

    def turn(self, schedules: Schedules, now: float) -> list[float]:
        """Record what `schedules` accepts; return the minutes that were not there before."""
        before = set(self.table.open)
        accepted = schedules.due(self.table, "n#1", now)
        for event in accepted:
            self.table.apply(next(self._seqnums), now, event)
        return [(e.at - START) / MINUTE for e in accepted if e.id in set(self.table.open) - before]

    def end_all(self, now: float) -> None:
        for id_ in list(self.table.open):
            self.table.apply(next(self._seqnums), now, InvocationEnded("n#1", id_, 0, b"1"))


def at(minutes: float) -> float:
    return START + minutes * MINUTE


def test_each_due_time_is_accepted_once() -> None:
    clockwork = Clockwork()
    assert clockwork.turn(clockwork.first, at(0.9)) == []
    assert clockwork.first.next_due(clockwork.table, at(0.9)) == at(1)
    assert clockwork.turn(clockwork.first, at(1)) == [1]
    assert clockwork.turn(clockwork.first, at(1)) == []
    assert clockwork.first.next_due(clockwork.table, at(1)) == at(2)
    assert clockwork.turn(clockwork.first, at(2.1)) == [2]


def test_another_node_takes_a_due_time_a_lease_later_if_it_was_not_taken() -> None:
    clockwork = Clockwork()
    assert clockwork.second.next_due(clockwork.table, at(0)) == at(1) + LEASE_S
    clockwork.turn(clockwork.first, at(1))
    assert clockwork.turn(clockwork.second, at(1) + LEASE_S) == []
    assert clockwork.turn(clockwork.second, at(2) + LEASE_S - 0.1) == []
    assert clockwork.turn(clockwork.second, at(2) + LEASE_S) == [2]


def test_two_nodes_that_accept_the_same_due_time_are_one_run() -> None:
    clockwork = Clockwork()
    one, other = clockwork.node(0), clockwork.node(0)
    both = [one.due(clockwork.table, "a#1", at(1)), other.due(clockwork.table, "b#1", at(1))]
    assert both[0][0].id == both[1][0].id
    for seqnum, [event] in enumerate(both):
        clockwork.table.apply(seqnum, at(1), event)
    assert [i.executor for i in clockwork.table.open.values()] == ["a#1"]


def test_a_late_record_of_an_old_due_time_runs_nothing() -> None:
    clockwork = Clockwork()
    [old] = clockwork.first.due(clockwork.table, "a#1", at(1))
    clockwork.turn(clockwork.first, at(1))
    clockwork.turn(clockwork.first, at(2))
    clockwork.end_all(at(3))
    clockwork.table.apply(99, at(1e6), InvocationAccepted(
        id="late", executor="a#1", function=old.function, arguments=b"{}", position=0,
        stream=old.stream, schedule=old.schedule, at=old.at,
    ))  # fmt: skip
    assert clockwork.table.get("late") is None


def test_a_wall_clock_that_was_a_year_ahead_silences_no_schedule() -> None:
    clockwork = Clockwork()
    assert clockwork.turn(clockwork.first, at(1)) == [1]
    year = 366 * 24 * 60.0
    assert clockwork.turn(clockwork.first, at(year + 1.5)) == [year + 1], "what it took for missed"
    for node in (clockwork.first, clockwork.node(0)):  # also after a restart
        start = (clockwork.table.last_due[clockwork.scheduled.name].at - START) / MINUTE
        begin = 2.5 if start > 100 else start
        assert clockwork.turn(node, at(begin)) == []
        assert node.next_due(clockwork.table, at(begin)) == at(int(begin) + 1)
        assert clockwork.turn(node, at(begin + 1)) == [int(begin) + 1]
        assert clockwork.turn(node, at(begin + 2)) == [int(begin) + 2]


def test_a_wall_clock_that_goes_back_a_little_runs_nothing_twice() -> None:
    clockwork = Clockwork()
    assert clockwork.turn(clockwork.first, at(200)) == [200]
    for minute in (20.5, 199.0, 200.0, 200.9):  # set back by just under three hours
        assert clockwork.turn(clockwork.first, at(minute)) == []
    assert clockwork.turn(clockwork.first, at(201)) == [201]


def test_a_due_time_that_ran_before_the_clock_was_set_back_is_skipped_once() -> None:
    clockwork = Clockwork()
    for minute in (1, 2, 3, 300):
        assert clockwork.turn(clockwork.first, at(minute)) == [minute]
    assert clockwork.turn(clockwork.first, at(0.5)) == []
    ran = [clockwork.turn(clockwork.first, at(minute)) for minute in (1, 2, 3, 4)]
    assert ran == [[], [], [], [4]], "its invocation is known"


def test_a_deployment_by_a_node_whose_clock_is_wrong_begins_when_it_was_ordered() -> None:
    clockwork = Clockwork("all")
    node = Schedules(lambda: 0, clockwork._config)
    behind_s = 1e6 * MINUTE  # the log's time is behind the wall clock
    scheduled = clockwork.scheduled._replace(since=at(7.5) - behind_s)
    node.take([scheduled], ahead_s=behind_s)
    assert clockwork.turn(node, at(9.5)) == [8, 9]


@pytest.mark.parametrize(
    ("catch_up", "minutes"), [("last", [9]), ("all", [5, 6, 7, 8, 9]), ("none", [9])]
)
def test_missed_due_times_run_by_the_setting_catch_up(
    catch_up: CatchUp, minutes: list[float]
) -> None:
    clockwork = Clockwork(catch_up)
    assert clockwork.turn(clockwork.first, at(9.5)) == minutes
    assert clockwork.first.next_due(clockwork.table, at(9.5)) == at(10)


def test_due_times_missed_long_ago_do_not_run_without_catching_up() -> None:
    clockwork = Clockwork("none")
    spec = ScheduleSpec("f", "0 * * * *", "UTC", "none")  # the hours at 20, 80, 140 minutes
    clockwork.scheduled = DeployedSchedule("app.f", spec, START)
    node = clockwork.node(0)
    assert clockwork.turn(node, at(82)) == []
    assert node.next_due(clockwork.table, at(82)) == at(140)
    assert clockwork.turn(node, at(141)) == [140]


def test_due_times_before_the_deployment_are_not_missed() -> None:
    clockwork = Clockwork("all")
    clockwork.scheduled = clockwork.scheduled._replace(since=at(7.5))
    assert clockwork.turn(clockwork.node(0), at(9.5)) == [8, 9]


def test_a_deployment_skips_nothing_that_was_due_before_it() -> None:
    clockwork = Clockwork()
    clockwork.turn(clockwork.first, at(1))
    clockwork.first.take([clockwork.scheduled])
    assert clockwork.turn(clockwork.first, at(2.2)) == [2]


def test_due_times_without_a_deployment_do_not_run() -> None:
    clockwork = Clockwork("all")
    clockwork.turn(clockwork.first, at(1))
    clockwork.first.take([clockwork.scheduled._replace(since=at(4.5))])
    assert clockwork.turn(clockwork.first, at(5.2)) == [5]


def test_a_schedule_that_this_machine_does_not_understand_stops_no_other() -> None:
    clockwork = Clockwork()
    spec = clockwork.scheduled.spec
    clockwork.first.take(
        [
            DeployedSchedule(
                "app.g", msgspec.structs.replace(spec, timezone="Nowhere/At_All"), START
            ),
            DeployedSchedule("app.h", msgspec.structs.replace(spec, expression="never"), START),
            clockwork.scheduled,
        ]
    )
    assert clockwork.first.next_due(clockwork.table, at(1)) == at(1)
    assert clockwork.turn(clockwork.first, at(1)) == [1]
    shown = {
        reported["schedule"]: reported["next"]
        for reported in clockwork.first.status(clockwork.table, at(1))
    }
    assert shown["app.g * * * * * Nowhere/At_All"] is None


def test_no_due_time_is_accepted_while_too_many_invocations_are_open() -> None:
    clockwork = Clockwork(open_max=1)
    assert clockwork.turn(clockwork.first, at(1)) == [1]
    assert clockwork.first.next_due(clockwork.table, at(1)) is None
    assert clockwork.turn(clockwork.first, at(2)) == []
    clockwork.end_all(at(3.5))
    assert clockwork.turn(clockwork.first, at(3.5)) == [3]


def test_the_schedules_of_one_application_leave_room_to_others() -> None:
    clockwork = Clockwork(open_max=3)
    other = DeployedSchedule("other.f", clockwork.scheduled.spec, START)
    clockwork.first.take([clockwork.scheduled, other])
    assert clockwork.turn(clockwork.first, at(1)) == [1, 1]
    assert clockwork.turn(clockwork.first, at(2)) == []
    clockwork.end_all(at(2))
    assert clockwork.turn(clockwork.first, at(2)) == [2, 2]


def test_a_schedule_is_shown_with_its_times() -> None:
    clockwork = Clockwork()
    clockwork.turn(clockwork.first, at(1))
    assert clockwork.first.status(clockwork.table, at(1)) == [
        {
            "schedule": "app.f * * * * * UTC",
            "last": "1970-01-01T16:41:00+00:00",
            "next": "1970-01-01T16:42:00+00:00",
            "catch_up": "last",
        }
    ]


def test_the_last_due_time_of_a_schedule_is_known_when_its_records_are_trimmed() -> None:
    clockwork = Clockwork()
    for minute in range(1, 5):
        clockwork.turn(clockwork.first, at(minute))
        clockwork.end_all(at(minute))
    checkpoint = clockwork.table.checkpoint()
    clockwork.table = InvocationTable.restored(
        TableLimits(1e9, 0, 0, 10**6, 1.0, 4.0), NewestCheckpoint(checkpoint, 0)
    )
    assert clockwork.turn(clockwork.node(0), at(4.5)) == []
    assert clockwork.turn(clockwork.node(0), at(5)) == [5]
