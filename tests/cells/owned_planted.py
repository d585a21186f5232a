"""Bugs that the simulation of owned logs must catch, as changes of one line of the code."""

from __future__ import annotations

from indilog.runtime.cell_store import CellStore
from indilog_cells.core import Core
from indilog_cells.layout_changes import LayoutChanges
from indilog_cells.owned_cells import OwnedCells
from indilog_cells.stored_cells import StoredCells
from indilog_compute.owner_appends import OwnerAppends
from tests.cells.planted import Planted

OWNED_BUGS = (
    Planted(
        "an owner that is fenced still writes", CellStore, "_serve",
        "if _is_refused(question, known):",
        "if epoch < known and not isinstance(question, CellWrite):",
        seed=41,
    ),
    Planted(
        "a claim seals no quorum", LayoutChanges, "change",
        "asked = [replica for replica in sorted(layout.replicas) if replica not in lost]",
        "return await self._record(layout, revised, epoch, layout.replicas, opened)",
        seed=16,
    ),
    Planted(
        "a claim asks one replica what there is", OwnedCells, "recover",
        "counts = Counter(key for answer in listed for key in answer.listed)",
        "counts = Counter(key for answer in listed[:1] for key in answer.listed)",
        seed=17,
    ),
    Planted(
        "a claim copies nothing", OwnedCells, "_begin_epoch",
        "end = await self.recover(layout)", "end = 0",
        seed=10,
    ),
    Planted(
        "a process writes in the epoch of another owner", OwnedCells, "_is_own",
        "return bool(self._owner) and layout.owner == self._owner", "return bool(self._owner)",
        seed=11,
    ),
    Planted(
        "a request that arrives twice is executed twice", OwnerAppends, "_on_append",
        "if not served.begin(request):", "served.begin(request)\n    if False:",
    ),
    Planted(
        "the content of a lost answer is appended again at once", Core, "_on_answered",
        "return self._unsettle(sent) if outcomes is None else self._complete(sent, outcomes)",
        "if outcomes is None:\n"
        "        self._waiting.extendleft(sent.submitted)\n"
        "        return []\n"
        "    return self._complete(sent, outcomes)",
        seed=1,
    ),
    Planted(
        "the barrier is appended by the owner that did not answer", OwnedCells, "give_up_on",
        "self._useless_owner = owner", "pass",
    ),
    Planted(
        "a deposed owner acknowledges the content of another process", Core, "_end_tenure",
        "effects += self._unsettle(self._in_flight.pop(position))",
        "sent = self._in_flight.pop(position)\n"
        "        if sent.received is not None:\n"
        "            placed = Placed(self.state.tail)\n"
        "            effects.append(ContentApplied(sent.received.ticket, [placed] * 64))\n"
        "            continue\n"
        "        effects += self._unsettle(sent)",
        seed=1,
    ),
    Planted(
        "an owner appends in a later tenure what it was sent in an earlier one", Core,
        "_end_tenure",
        "self._received.clear()", "pass",
        seed=10,
    ),
    Planted(
        "a reader shows what the ack quorum may not have", OwnedCells, "_read_last",
        "if outcomes[CellOutcome.DONE] < layout.ack_quorum:", "if False:",
        seed=15,
    ),
    Planted(
        "an append is acknowledged when one replica has it", OwnedCells, "_write_all",
        "needed = layout.ack_quorum", "needed = 1",
        seed=22,
    ),
    Planted(
        "a later append is acknowledged before an earlier one", Core, "_advance",
        "while (position := self.state.position) in self._known:\n"
        "        content = self._known.pop(position)",
        "while (position := self.state.position) <= max(self._known, default=-1):\n"
        "        content = self._known.pop(position, None)",
    ),
    Planted(
        "a backup takes what one disk has", StoredCells, "_read",
        "count + damaged >= needed", "True",
        seed=32,
    ),
    Planted(
        "a backup takes only what all disks have", StoredCells, "_read",
        "len(there) - self._layout.lacking", "len(there)",
        seed=9,
    ),
    Planted(
        "a replica that is filling gets contents that no quorum has", OwnedCells, "_write_all",
        "asks, numbers = self._writes(lag, position, content, complete, 0)",
        "asks, numbers = self._writes(lag, position, content, complete, 0)\n"
        "    self._write_filling(lag, position, content)",
        seed=13,
    ),
)  # fmt: skip
