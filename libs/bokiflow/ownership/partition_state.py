"""Derives which runs of a partition are open, from the records that begin, end and wake runs.

The rules are those of `bokiflow.runs.run_state`, without the records of steps. Steps do not change
whether a run is open, so both states agree. Ended runs are not kept. `ownership.partition` keeps
replicas of `PartitionState`; `taking` and `run_lists` read the open runs.
"""

from __future__ import annotations

import enum
import sys
from collections import Counter
from functools import lru_cache
from typing import Final

import msgspec

from bokiflow.runs.errors import FlowVersionError
from bokiflow.runs.records import (
    VERSION,
    CancelAsked,
    ChildEnded,
    CodeVersion,
    MoveAsked,
    RetryAsked,
    RunContinued,
    RunFinished,
    RunForgotten,
    RunParked,
    RunStarted,
    RunTaken,
    RunWaits,
    Signalled,
    partition_record,
    partition_tag,
    run_in,
)
from indilog import Record
from indilog.replayed import State, SubStream
from indilog.sdk import RecordFormat, SeqNum

_FORMAT: Final = RecordFormat(b"\xb0P", VERSION, of="BokiFlow", error=FlowVersionError)


class Phase(enum.IntEnum):
    """The phase of an open run."""

    RUNNING = 0
    WAITING = 1
    PARKED = 2


class OpenRun(msgspec.Struct, array_like=True, gc=False):
    """A run that has begun and not ended.

    Attributes:
        workflow: name of its workflow.
        started_at: seqnum of its start.
        began: time of its start, seconds since 1970.
        epoch: its current epoch.
        phase: whether it executes, waits or is parked.
        until: log time at which a waiting run is due; None: no time is set.
        what: the reason why the run waits or is parked, as text.
        since: time of the record that began the phase, seconds since 1970.
        crashes: how many executors in a row crashed right after they got the run.
        is_notified: whether a record for the run came while the run was waiting or parked.
        limit: name of the limit of the run; empty: it has none.
        notified_at: seqnum of the last record for the run that its execution did not write, such as
            a signal; -1: there is none.
        round_at: seqnum of the record that began its current round; -1: not known.
        code: the deployment with whose code it continues; None: it is not known.
        executor: its current or last executor; empty: it has had none, or it is not known.
        round: number of its current round, from 1.
    """

    workflow: str
    started_at: SeqNum
    began: float
    epoch: int
    phase: int = Phase.RUNNING
    until: float | None = None
    what: str = ""
    since: float = 0.0
    crashes: int = 0
    is_notified: bool = False
    limit: str = ""
    notified_at: SeqNum = -1
    round_at: SeqNum = -1
    code: CodeVersion | None = None
    executor: str = ""
    round: int = 1


_WHAT_MAX: Final = 200
_VOID_ENDS_MAX: Final = 1_000
"""Largest number of ends without an effect that are kept; the oldest are dropped first."""
_CODES_SHARED: Final = 1_024


@lru_cache(_CODES_SHARED)
def _shared(version: int, digest: str) -> CodeVersion:
    """Return one object for equal versions."""
    return CodeVersion(version, digest)


_Snapshot = tuple[dict[str, OpenRun], list[SeqNum]]


class PartitionState(State[None]):
    """The open runs of a partition, as of the records read so far.

    Attributes:
        runs: the open runs, by id, in the order of their starts.
        parked: the ids of the parked runs.
        codes: number of open runs of each deployment.
        void_ends: seqnums of `RunFinished` records without effect: their epoch was not the current
            one, or the run had ended. Lists of ended runs leave these records out.
    """

    def __init__(self) -> None:
        self.runs: dict[str, OpenRun] = {}
        self.parked: dict[str, None] = {}
        self.codes: Counter[CodeVersion] = Counter()
        self.void_ends: dict[SeqNum, None] = {}

    @property
    def active(self) -> int:
        """Number of open runs that are not parked."""
        return len(self.runs) - len(self.parked)

    @property
    def size(self) -> int:
        """See `State.size`."""
        return len(self.runs) + len(self.void_ends)

    def snapshot(self) -> tuple[dict[str, tuple[object, ...]], list[SeqNum]]:
        """See `State.snapshot`."""
        runs = {id_: msgspec.structs.astuple(run) for id_, run in self.runs.items()}
        return runs, list(self.void_ends)

    @classmethod
    def restore(cls, content: bytes) -> PartitionState:
        """Return the state of an encoded snapshot."""
        state = cls()
        state.runs, void_ends = msgspec.msgpack.decode(content, type=_Snapshot)
        for run in state.runs.values():  # many runs share a text
            run.workflow, run.what = sys.intern(run.workflow), sys.intern(run.what)
            run.limit, code = sys.intern(run.limit), run.code
            run.executor = sys.intern(run.executor)
            run.code = None
            state._set_code(run, code)
        state.parked = {id_: None for id_, run in state.runs.items() if run.phase == Phase.PARKED}
        state.void_ends = dict.fromkeys(void_ends)
        return state

    def apply(self, record: Record) -> None:
        """Apply a record.

        Raises:
            FlowVersionError: another version wrote the record.
        """
        said = partition_record(record.data)
        if isinstance(said, RunForgotten):
            known = self.runs.get(said.run)
            if known is not None and known.started_at == said.started_at:
                self._end(said.run)
            return
        id_ = run_in(record.tags)
        if said is None or id_ is None:
            return
        run = self.runs.get(id_)
        if isinstance(said, RunFinished) and (run is None or said.epoch != run.epoch):
            self.void_ends[record.seqnum] = None
            if len(self.void_ends) > _VOID_ENDS_MAX:
                del self.void_ends[next(iter(self.void_ends))]
            return
        if isinstance(said, RunStarted):
            if run is None:
                epoch = int(bool(said.executor))
                at = record.ordered_at
                limit = "" if said.limit is None else sys.intern(said.limit.name)
                self.runs[id_] = OpenRun(
                    sys.intern(said.workflow),
                    record.seqnum,
                    at,
                    epoch,
                    since=at,
                    limit=limit,
                    round_at=record.seqnum,
                    executor=sys.intern(said.executor),
                )
                self._set_code(self.runs[id_], said.code)
        elif run is not None:
            self._apply_to(id_, run, said, record)

    def _apply_to(self, id_: str, run: OpenRun, said: object, record: Record) -> None:
        now = record.ordered_at
        match said:
            case RunTaken(epoch, executor, crashes, code) if epoch == run.epoch + 1:
                run.epoch, run.executor, run.crashes = epoch, sys.intern(executor), crashes
                if code is not None:
                    self._set_code(run, code)
                self._enter(id_, run, Phase.RUNNING, now)
            case RunWaits(epoch, until, what, end) if epoch == run.epoch:
                if run.phase == Phase.RUNNING:
                    run.crashes = 0
                    self._enter(id_, run, Phase.WAITING, now, until, what)
                    run.is_notified = run.notified_at >= end
            case RunContinued(epoch=epoch, code=code) if epoch == run.epoch:
                run.epoch, run.crashes, run.round_at = epoch + 1, 0, record.seqnum
                run.executor, run.round = sys.intern(said.executor), said.round
                self._set_code(run, code)
                self._enter(id_, run, Phase.RUNNING, now)
            case RunParked(epoch, _, reason) if epoch == run.epoch:
                self._enter(id_, run, Phase.PARKED, now, None, reason)
            case RunFinished():
                self._end(id_)
            case Signalled() | CancelAsked() | ChildEnded() | RetryAsked() | MoveAsked():
                run.notified_at = record.seqnum
                run.is_notified = run.is_notified or run.phase != Phase.RUNNING
            case _:
                pass  # the record is of another epoch

    def _enter(
        self,
        id_: str,
        run: OpenRun,
        phase: Phase,
        now: float,
        until: float | None = None,
        what: str = "",
    ) -> None:
        run.phase, run.until, run.since = phase, until, now
        run.what = sys.intern(what[:_WHAT_MAX])
        run.is_notified = False
        if phase == Phase.PARKED:
            self.parked[id_] = None
        else:
            self.parked.pop(id_, None)

    def _set_code(self, run: OpenRun, code: CodeVersion | None) -> None:
        """Note the code with which a run continues. Many runs share one object."""
        if run.code is not None:
            self.codes[run.code] -= 1
            if not self.codes[run.code]:
                del self.codes[run.code]
        run.code = None if code is None else _shared(code.version, code.digest)
        if run.code is not None:
            self.codes[run.code] += 1

    def _end(self, id_: str) -> None:
        self._set_code(self.runs[id_], None)
        del self.runs[id_]
        self.parked.pop(id_, None)


def partition_stream(partition: int) -> SubStream:
    """Return the sub-stream of a partition."""
    tag = partition_tag(partition)
    return SubStream(tag, f"{tag}-state", _FORMAT, f"Partition {partition} of the flow")
