"""The dispatcher against a naive model that keeps plain lists of the calls of each worker."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from indilog.base.errors import NotReadyError, OverloadedError
from indilog_compute.workers.dispatch import Dispatcher, Shares

SLOTS, CALLS = 2, 6
SHARES = Shares(slots=0.7, pending=0.5)
APPLICATIONS = st.sampled_from("abc")


class Call(NamedTuple):
    """A call, as the dispatcher sees it."""

    number: int
    application: str
    is_nested: bool


class DispatchMachine(RuleBasedStateMachine):
    """Any order of calls, ends, crashes and starts, of three applications."""

    may_be_shared = True

    def __init__(self) -> None:
        super().__init__()
        self.is_shared = self.may_be_shared
        self.real: Dispatcher[int, Call] = Dispatcher(
            worker_calls_max=SLOTS,
            calls_max=CALLS,
            shares=SHARES,
            is_shared=self.is_shared,
        )
        self.runs: dict[int, list[Call]] = {}
        self.waits: list[Call] = []
        """Calls of one application start in order; those of several applications in any order."""
        self.suspended: set[int] = set()
        self.next_call = 0
        self.next_worker = 0

    # --- the model

    def running(self, *, nested: bool) -> list[Call]:
        return [c for calls in self.runs.values() for c in calls if c.is_nested == nested]

    def slots_of(self, worker: int) -> int:
        return sum(not c.is_nested for c in self.runs[worker])

    def free_workers(self) -> list[int]:
        return [w for w in self.runs if w not in self.suspended and self.slots_of(w) < SLOTS]

    def limit(self, share: float, in_all: int, others: int) -> int:
        return max(1, int(share * (in_all - others))) if self.is_shared else in_all - others

    def may_start(self, application: str) -> bool:
        running = self.running(nested=False)
        own = sum(c.application == application for c in running)
        in_all = SLOTS * len(self.runs)
        return own < self.limit(SHARES.slots, in_all, len(running) - own)

    def may_be_kept(self, call: Call) -> bool:
        pending = self.running(nested=call.is_nested) + ([] if call.is_nested else self.waits)
        own = sum(c.application == call.application for c in pending)
        return len(pending) < CALLS and own < self.limit(SHARES.pending, CALLS, len(pending) - own)

    def first_waiting(self) -> dict[str, Call]:
        first: dict[str, Call] = {}
        for call in self.waits:
            first.setdefault(call.application, call)
        return first

    def check_started(self, started: list[tuple[Call, int]]) -> None:
        """Check the waiting calls that start now, one after the other."""
        for call, worker in started:
            first = self.first_waiting()
            assert first[call.application] == call, "in the order in which they came"
            assert self.may_start(call.application)
            least = min(len(self.runs[w]) for w in self.free_workers())
            assert worker in self.free_workers()
            assert len(self.runs[worker]) == least
            self.waits.remove(call)
            self.runs[worker].append(call)
        startable = [app for app in self.first_waiting() if self.may_start(app)]
        assert not (startable and self.free_workers()), "no call waits that could run"

    def check_placed(self, call: Call, worker: int | None) -> None:
        """Check the worker of an admitted call, or of a nested call that was returned to the
        queue.
        """
        if worker is None:
            assert not call.is_nested
            waits = any(c.application == call.application for c in self.waits)
            could = self.free_workers() and self.may_start(call.application)
            assert not could or waits
            self.waits.append(call)
            return
        if call.is_nested:
            candidates = [w for w in self.runs if w not in self.suspended] or list(self.runs)
        else:
            candidates = self.free_workers()
            assert self.may_start(call.application)
        assert worker in candidates
        assert len(self.runs[worker]) == min(len(self.runs[w]) for w in candidates)
        self.runs[worker].append(call)

    # --- what happens

    @rule(application=APPLICATIONS, nested=st.booleans())
    def call(self, application: str, nested: bool) -> None:
        call, self.next_call = Call(self.next_call, application, nested), self.next_call + 1
        try:
            worker = self.real.admit(call)
        except OverloadedError:
            assert not self.may_be_kept(call)
            return
        except NotReadyError:
            assert nested
            assert not self.runs
            return
        assert self.may_be_kept(call)
        self.check_placed(call, worker)

    @precondition(lambda self: any(self.runs.values()))
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """Calls that a suspended worker has not begun move to other workers, before all waiting
        calls.
        """
        worker = data.draw(st.sampled_from([w for w, calls in self.runs.items() if calls]))
        self.real.suspend(worker)
        self.suspended.add(worker)
        count = data.draw(st.integers(1, len(self.runs[worker])))
        moved, self.runs[worker] = self.runs[worker][-count:], self.runs[worker][:-count]
        started = self.real.put_back(moved, worker)
        nested = [call for call in moved if call.is_nested]
        self.waits = [call for call in moved if not call.is_nested] + self.waits
        for call, placed in started[: len(nested)]:
            assert call in nested
            self.check_placed(call, placed)
        self.check_started(started[len(nested) :])

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.runs)))
        self.real.suspend(worker)
        self.suspended.add(worker)

    @precondition(lambda self: self.suspended)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.suspended)))
        self.suspended.remove(worker)
        self.check_started(self.real.resume(worker))

    @precondition(lambda self: any(self.runs.values()))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([w for w, calls in self.runs.items() if calls]))
        call = data.draw(st.sampled_from(self.runs[worker]))
        self.runs[worker].remove(call)
        self.check_started(self.real.finished(worker, call))

    @precondition(lambda self: len(self.runs) < 3)
    @rule()
    def start_worker(self) -> None:
        worker, self.next_worker = self.next_worker, self.next_worker + 1
        self.runs[worker] = []
        self.check_started(self.real.add(worker))

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def kill_worker(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.runs)))
        lost = self.runs.pop(worker)
        self.suspended.discard(worker)
        self.check_started(self.real.remove(worker))
        for call in lost:
            assert self.real.finished(worker, call) == []

    @precondition(lambda self: self.waits)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.waits))
        self.waits.remove(call)
        assert self.real.withdraw(call)

    @rule()
    def change_the_number_of_applications(self) -> None:
        self.is_shared = self.may_be_shared and not self.is_shared
        self.check_started(self.real.set_shared(is_shared=self.is_shared))

    @invariant()
    def counts_agree(self) -> None:
        self.real.check_invariants()
        assert self.real.running == sum(len(calls) for calls in self.runs.values())
        assert self.real.waiting == len(self.waits)


class AloneMachine(DispatchMachine):
    """The same machine for an application without a share."""

    may_be_shared = False


TestDispatch = DispatchMachine.TestCase
TestDispatch.settings = settings(max_examples=40, stateful_step_count=40)
TestAlone = AloneMachine.TestCase
TestAlone.settings = settings(max_examples=20, stateful_step_count=40)
