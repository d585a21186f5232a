"""Bugs that the simulation of cells must catch, as changes of one line of the code."""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from indilog_cells.core import Core
from indilog_cells.state import LogState
from tests.cells.world import Process, Store


class Planted(NamedTuple):
    """A bug: in a method of a class, the text `before` becomes `after`.

    Attributes:
        seed: the seed that is tried first, because its run showed the bug and was short.
    """

    name: str
    owner: type
    method: str
    before: str
    after: str
    seed: int = 0

    def seeds(self, until: int) -> Iterator[int]:
        """Yield the seeds below `until`, the one that is tried first in the first place."""
        yield self.seed
        yield from (seed for seed in range(until) if seed != self.seed)

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Change the method until the test ends."""
        method = getattr(self.owner, self.method)
        function: Any = method.fget if isinstance(method, property) else method
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.before) == 1, f"plant {self.name!r} in the new source"
        changed = source.replace(self.before, self.after)
        flags = __future__.annotations.compiler_flag
        made: dict[str, Any] = {}
        names = vars(sys.modules[self.owner.__module__])
        exec(compile(changed, self.name, "exec", flags), names, made)
        monkeypatch.setattr(self.owner, self.method, made[self.method])


BUGS = (
    Planted(
        "a fill overwrites a content", Store, "write",
        "if position in self.cells:", "if position in self.cells and len(content) > 9:",
    ),
    Planted(
        "a stale token is accepted after a later epoch began", LogState, "apply",
        "if content.epoch < self.epoch + content.is_claim:", "if False:",
    ),
    Planted(
        "a new incarnation begins no epoch", Core, "_next_content",
        "self.state.epoch + 1 if self._epoch is None", "self.state.epoch if self._epoch is None",
    ),
    Planted(
        "a cell that is not written in time is skipped, not filled", Core, "_repair_hole",
        "return [WriteCell(position, JUNK)]", "self._known[position] = None",
    ),
    Planted(
        "after an unknown outcome the records go to another cell", Core, "_on_failed",
        "sent.retry_us = now_us + sent.backoff_us",
        "self._waiting.extendleft(reversed(self._in_flight.pop(position).submitted))",
    ),
    Planted(
        "catching up is done by a read that began before", Core, "_on_unwritten",
        "if before < number", "if True",
        seed=77,
    ),
    Planted(
        "a later cell that is unwritten ends catching up", Core, "_on_unwritten",
        "position != self.state.position or number is None", "number is None",
    ),
    Planted(
        "a taken cell is taken for an own one", Core, "_on_taken",
        "self._taken.add(position)",
        "self._known[position] = decode(self._in_flight[position].content) "
        "if position in self._in_flight else None",
    ),
    Planted(
        "an acknowledged junk cell is taken for the own content", Core, "_on_written",
        "self._known[position] = decode(content)",
        "own = self._in_flight.get(position)\n"
        "        self._known[position] = decode(own.content if own else content)",
        seed=146,
    ),
    Planted(
        "a trimmed cell can be written again", Store, "trim",
        'self.cells[position] = b""', "del self.cells[position], self.first[position]",
    ),
    Planted(
        "a condition is not checked again in its place", LogState, "_place",
        "records.after is not None and", "False and",
    ),
    Planted(
        "a condition that was checked before the open generation holds", LogState, "_refusal",
        "if after.checked < self.open.first:", "if False:",
    ),
    Planted(
        "records of a checkpoint are counted again", LogState, "restored",
        "state.position, state.tail = found.position, found.tail",
        "state.position, state.tail = found.position, 0",
    ),
    Planted(
        "a process that fell behind forgets nothing of its own", Core, "restart",
        "if each < state.position", "if False",
    ),
    Planted(
        "a request of a crashed process reaches its successor", Process, "_deliver",
        "if own == self.incarnation:", "if True:",
    ),
)  # fmt: skip
