"""The dispatcher against a naive model that keeps plain lists of who runs what."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from compute.workers.dispatch import Dispatcher
from indilog.errors import NotReadyError, OverloadedError

SLOTS, CALLS = 2, 5


class DispatchMachine(RuleBasedStateMachine):
    """Any order of calls, ends, deaths and starts."""

    def __init__(self) -> None:
        super().__init__()
        self.real: Dispatcher[int, int] = Dispatcher(worker_calls_max=SLOTS, calls_max=CALLS)
        self.runs: dict[int, list[int]] = {}
        self.waits: list[int] = []
        self.suspended: set[int] = set()
        self.next_call = 0
        self.next_worker = 0

    @rule(nested=st.booleans())
    def call(self, nested: bool) -> None:
        call, self.next_call = self.next_call, self.next_call + 1
        total = sum(len(calls) for calls in self.runs.values()) + len(self.waits)
        try:
            worker = self.real.admit(call, nested=nested)
        except OverloadedError:
            assert total >= (2 * CALLS if nested else CALLS)
            return
        except NotReadyError:
            assert nested
            assert not self.runs
            return
        assert total < (2 * CALLS if nested else CALLS)
        if self.placed(call, worker, nested=nested):
            self.waits.append(call)

    def placed(self, call: int, worker: int | None, *, nested: bool) -> bool:
        """Check where a call went; True: it waits."""
        free = {w: len(calls) for w, calls in self.runs.items() if w not in self.suspended}
        if worker is None:
            assert not nested
            assert all(count >= SLOTS for count in free.values())
            return True
        if worker in self.suspended:
            assert nested
            assert not free
        else:
            assert free[worker] == min(free.values())
        self.runs[worker].append(call)
        return False

    @precondition(lambda self: any(self.runs.values()))
    @rule(data=st.data(), nested=st.booleans())
    def move(self, data: st.DataObject, nested: bool) -> None:
        """A call that a suspended worker has not begun goes elsewhere."""
        worker = data.draw(st.sampled_from([w for w, calls in self.runs.items() if calls]))
        self.real.suspend(worker)
        self.suspended.add(worker)
        call = self.runs[worker].pop()
        assert self.real.finished(worker) is None
        if self.placed(call, self.real.again(call, nested=nested), nested=nested):
            self.waits.insert(0, call)

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
        room = max(0, SLOTS - len(self.runs[worker]))
        started, self.waits = self.waits[:room], self.waits[room:]
        assert self.real.resume(worker) == started
        self.runs[worker] += started

    @precondition(lambda self: any(self.runs.values()))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([w for w, calls in self.runs.items() if calls]))
        self.runs[worker].pop()
        started = self.real.finished(worker)
        has_room = worker not in self.suspended and len(self.runs[worker]) < SLOTS
        expected = self.waits[0] if self.waits and has_room else None
        assert started == expected
        if started is not None:
            self.runs[worker].append(self.waits.pop(0))

    @precondition(lambda self: len(self.runs) < 3)
    @rule()
    def start_worker(self) -> None:
        worker, self.next_worker = self.next_worker, self.next_worker + 1
        started, self.waits = self.waits[:SLOTS], self.waits[SLOTS:]
        assert self.real.add(worker) == started
        self.runs[worker] = started

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def kill_worker(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.runs)))
        del self.runs[worker]
        self.suspended.discard(worker)
        self.real.remove(worker)
        assert self.real.finished(worker) is None

    @precondition(lambda self: self.waits)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(self.waits))
        self.waits.remove(call)
        assert self.real.withdraw(call)

    @invariant()
    def counts_agree(self) -> None:
        assert self.real.running == sum(len(calls) for calls in self.runs.values())
        assert self.real.waiting == len(self.waits)
        self.real.check_invariants()


TestDispatch = DispatchMachine.TestCase
TestDispatch.settings = settings(max_examples=40, stateful_step_count=40)
