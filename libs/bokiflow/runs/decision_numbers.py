"""Numbers the decisions of a round, so that the last decisions show the number of all decisions.

A decision gets a number only if no other append of its execution is in flight. So if two successive
decisions in the log have successive numbers, the last number is the number of all decisions.
`execution` numbers its decisions here; `run_status` reads the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

from msgspec.structs import replace

from bokiflow.runs.records import RunRecord, StepDecided
from bokiflow.runs.run_state import RunState
from indilog.sdk import SeqNum

STATUS: Final = "status"
"""The kind of a decision that sets the status."""
_RecordT = TypeVar("_RecordT", bound=RunRecord)


class DecisionNumbers:
    """The numbers of the decisions of one execution.

    Args:
        run: the run as of the record that began the execution's epoch.
    """

    def __init__(self, run: RunState) -> None:
        self._durable = len(run.steps)
        self._status_at: SeqNum = -1
        for number, step in run.steps.items():
            if step.kind == STATUS:
                self._status_at = run.places[number]
        self._in_flight = 0
        self._are_known = True

    def begin(self, records: Sequence[_RecordT]) -> list[_RecordT]:
        """Return the records with their numbers. The caller appends them now, as one batch."""
        is_alone = self._are_known and not self._in_flight
        self._in_flight += 1
        return list(self._numbered(records) if is_alone else records)

    def _numbered(self, records: Sequence[_RecordT]) -> Iterator[_RecordT]:
        nth, is_known = self._durable, True
        for record in records:
            if isinstance(record, StepDecided):
                nth += 1
                yield replace(record, nth=nth * is_known, status_at=self._status_at)
                is_known = is_known and record.kind != STATUS  # the next `status_at` is not known
            else:
                yield record

    def end(self, records: Sequence[RunRecord], seqnums: Sequence[SeqNum]) -> None:
        """Note that these records are durable."""
        self._in_flight -= 1
        for record, seqnum in zip(records, seqnums, strict=False):
            if isinstance(record, StepDecided):
                self._durable += 1
                if record.kind == STATUS:
                    self._status_at = max(self._status_at, seqnum)

    def fail(self) -> None:
        """Note that it is unknown whether records are durable."""
        self._in_flight -= 1
        self._are_known = False
