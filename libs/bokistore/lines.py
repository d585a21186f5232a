"""Lines in which the transactions of a process wait for an object in conflict.

Transactions are optimistic: they begin without waiting, and the log decides which of them commits.
If many transactions change one object, all but one conflict in each round, so n transactions cost
n² attempts. So a transaction that conflicted waits in a line for each object that others had
changed. The transactions in a line run one at a time, in the order of arrival. A transaction that
begins to read an object with a line enters the line, too. Objects without conflicts have no lines.

A line decides when a transaction runs, never whether the transaction commits. Three rules prevent a
deadlock:

- A transaction enters several lines in the order of the objects' names.
- A transaction that has a turn does not wait when it reads another object with a line.
- A transaction inside the body of another one does not wait at all.

A turn ends with its transaction. If a transaction takes longer than `TURN_S`, the next one in the
line starts while the first one is still running, and the group before it commits without it.
`Store.transact` makes a `Contender` for each call, and `Transaction` uses it; `bokistore.log_lines`
orders the processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import islice
from typing import Final, Protocol, TypeVar

from bokistore.log_lines import LOSSES_MAX, LogTurn
from indilog.sdk import Event, run_in_background

GroupT = TypeVar("GroupT", bound="CommitGroup")

TURN_S: Final = 5.0
"""Seconds after which the transactions in line no longer wait for the one that has its turn."""
MEMBERS_MAX: Final = 24
"""Largest number of transactions that share one record. Of the 64 tags of a record, each id uses
one, and released ids use up to 8.
"""
LINE_MAX: Final = 10_000
"""Largest number of transactions that wait in one line; a further one does not wait."""


class _Line:
    """The transactions that wait for one object.

    Attributes:
        first: the transaction that has its turn.
        group: the group of earlier transactions, whose record the first one may share; None: there
            is none.
        waiting: the transactions after it, each with the event that gives it the turn.
        log_turn: the place of this process in the object's line in the log; None: it has none.
    """

    __slots__ = ("first", "group", "log_turn", "waiting")

    def __init__(self, first: Contender) -> None:
        self.first = first
        self.group: CommitGroup | None = None
        self.log_turn: LogTurn | None = None
        self.waiting: deque[tuple[Contender, Event]] = deque()


class Lines:
    """The lines of a process for the objects of all logs of one platform."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], _Line] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def is_waited_for(self, place: tuple[str, str]) -> bool:
        """Tell whether an object has a line."""
        return place in self._lines

    async def enter(self, place: tuple[str, str], contender: Contender) -> bool:
        """Return when it is the contender's turn; False: the line is too long."""
        line = self._lines.get(place)
        if line is None:
            self._lines[place] = _Line(contender)
            return True
        if len(line.waiting) >= LINE_MAX:
            return False
        entry = contender, Event()
        line.waiting.append(entry)
        try:
            while line.first is not contender:
                before = line.first
                if not await entry[1].wait_within(TURN_S) and line.first is before:
                    group, line.group = line.group, None
                    self._advance(place, line)
                    if group is not None:
                        await group.commit_members()
        except BaseException:
            if line.first is contender:
                self._advance(place, line)
            else:
                line.waiting.remove(entry)
            raise
        return True

    def leave(self, place: tuple[str, str], contender: Contender) -> None:
        """Give the turn to the next transaction, unless the contender has already lost it."""
        line = self._lines.get(place)
        if line is not None and line.first is contender:
            self._advance(place, line)

    def line_of(self, place: tuple[str, str], contender: Contender) -> _Line | None:
        """Return the line of an object if it is the contender's turn."""
        line = self._lines.get(place)
        return line if line is not None and line.first is contender else None

    def _advance(self, place: tuple[str, str], line: _Line) -> None:
        if not line.waiting:
            if line.group is not None:  # the first one was cancelled just when it got the turn
                run_in_background(line.group.commit())
            del self._lines[place]
            return
        line.first, event = line.waiting.popleft()
        event.set()


class PendingAppends:
    """The objects that are changed by records of transactions which this process is appending.

    A transaction that read such an object would lose if it appended a record, too. So it waits, and
    conflicts without a record.
    """

    def __init__(self) -> None:
        self._pending: dict[tuple[str, str], Event] = {}

    def __len__(self) -> int:
        return len(self._pending)

    async def wait(self, log: str, names: Iterable[str]) -> None:
        """Return when none of the objects is being changed, or after `TURN_S` for each of them."""
        for name in names:
            event = self._pending.get((log, name))
            if event is not None:
                await event.wait_within(TURN_S)

    @contextmanager
    def changing(self, log: str, names: Iterable[str]) -> Iterator[None]:
        """Note that a record that changes the objects is being appended and decided."""
        places = [(log, name) for name in names if (log, name) not in self._pending]
        event = Event()
        self._pending.update(dict.fromkeys(places, event))
        try:
            yield
        finally:
            for place in places:
                del self._pending[place]
            event.set()


class CommitGroup(Protocol):
    """Transactions that wait for the commit of one record (`bokistore.groups`)."""

    async def commit(self) -> None:
        """Append the record. Its transactions raise the errors, not this call."""

    async def commit_members(self) -> None:
        """Append the record, unless no transaction has joined."""


class Contender:
    """One call of `Store.transact`: all its attempts have the same place in line.

    Args:
        lines: the lines of this process.
        log: name of the log of the objects.
    """

    def __init__(self, lines: Lines, log: str) -> None:
        self._lines = lines
        self._log = log
        self._lost: set[str] = set()
        self._turns: list[str] = []
        self._is_entering = False
        self._is_running = False
        self._own_turn: LogTurn | None = None
        self._losses = 0
        self.is_alone = False
        """Whether its transactions must have records of their own."""
        self.must_enter = False
        """Whether it must enter lines in the log: those of the objects on which it conflicted."""
        self.waits = not is_inside_body()
        """Whether it waits for others."""

    async def arrive(self, name: str) -> bool:
        """Stand in line for an object that is about to be read, if there is a line; return whether
        it waited.
        """
        place = self._log, name
        if self._turns or self._is_entering or not self.waits:
            return False
        if not self._lines.is_waited_for(place):
            return False
        self._lost.add(name)
        await self._enter([name])
        await self._settle()
        return True

    async def wait_for_turn(self, lost: Iterable[str]) -> None:
        """Stand in line after a conflict, for the objects that were changed by others."""
        self._lost.update(lost)
        self._losses += 1
        self.must_enter |= self._losses >= LOSSES_MAX
        if not self.waits or self._lost.issubset(self._turns):
            return
        await self.leave_log()
        self.leave()
        await self._enter(sorted(self._lost))

    async def _enter(self, names: Iterable[str]) -> None:
        self._is_entering = True
        try:
            for name in names:
                if await self._lines.enter((self._log, name), self):
                    self._turns.append(name)
                    if len(self._lost) > 1:
                        await self._settle()
        finally:
            self._is_entering = False

    @property
    def log_turn(self) -> LogTurn | None:
        """Its place in lines in the log; None: it has none."""
        line = self._only_line()
        turn = self._own_turn if line is None else line.log_turn
        return turn if turn is not None and turn.names else None

    async def enter_log(self, begin: Callable[[], LogTurn]) -> None:
        """Enter the lines in the log, and return when this process is the first in each. This does
        nothing unless the contender has its turns in this process, and it or one of the next in
        line must enter.
        """
        line = self._only_line()
        if not self._turns or not self.waits or self.log_turn is not None:
            return
        if line is not None:
            if line.group is not None:
                return  # the contender joins the group, which has entered already if it had to
            nearest = islice(line.waiting, MEMBERS_MAX)
            if not self.must_enter and not any(one.must_enter for one, _ in nearest):
                return
        elif not self.must_enter:
            return
        await self._settle()
        turn = begin()
        if line is None:
            await self._release_handed_on()
            self._own_turn = turn
        else:
            line.log_turn = turn
        self.must_enter = False
        await turn.acquire(self._turns)

    async def _release_handed_on(self) -> None:
        """Leave the lines in the log in which earlier transactions of this process have a place.
        This contender needs a place of its own, for several objects.
        """
        for name in self._turns:
            line = self._lines.line_of((self._log, name), self)
            if line is not None and line.log_turn is not None:
                turn, line.log_turn = line.log_turn, None
                await turn.release()

    async def leave_log(self) -> None:
        """Leave the lines in the log, unless a group still uses the same place."""
        line = self._only_line()
        turn, self._own_turn = self._own_turn, None
        if line is not None and line.group is None:
            turn, line.log_turn = line.log_turn or turn, None
        if turn is not None:
            await turn.release()

    async def group(self, begin: Callable[[], GroupT]) -> GroupT | None:
        """Return the group to which the next transaction belongs; None: it has its own record.

        A transaction that has the turn of exactly one object joins the group of the transactions
        before it. If there is no group, and others wait, it begins one.
        """
        line = self._only_line()
        if line is None or self.is_alone:
            await self._settle()
            return None
        if line.group is None and line.waiting:
            line.group = begin()
        return line.group  # type: ignore[return-value]

    def pass_on(self, group: CommitGroup) -> bool:
        """Give the turn to the next transaction, which joins the group; False: there is none."""
        line = self._only_line()
        if line is None or line.group is not group or not line.waiting:
            return False
        self.leave()
        return True

    def has_turn_of(self, group: CommitGroup) -> bool:
        """Tell whether it is the contender's turn, and the group waits for it."""
        line = self._only_line()
        return line is not None and line.group is group

    def end_group(self, group: CommitGroup) -> None:
        """Let the next transaction begin another group."""
        line = self._only_line()
        if line is not None and line.group is group:
            line.group = None

    def _only_line(self) -> _Line | None:
        if len(self._turns) != 1:
            return None
        return self._lines.line_of((self._log, self._turns[0]), self)

    async def _settle(self) -> None:
        """Commit the groups before this transaction, which does not join them."""
        for name in self._turns:
            line = self._lines.line_of((self._log, name), self)
            if line is not None and line.group is not None:
                group, line.group = line.group, None
                await group.commit()

    def leave(self) -> None:
        """Leave all lines; the next transactions get their turns."""
        while self._turns:
            self._lines.leave((self._log, self._turns.pop()), self)

    async def leave_all(self) -> None:
        """Leave the lines in the log, and those of this process."""
        try:
            if self._turns:
                await self.leave_log()
        finally:
            self.leave()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enter the body of the transaction. Transactions in the body do not wait."""
        token = _AROUND.set(self)
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
            with suppress(ValueError):  # the body may end in another context, for example of a step
                _AROUND.reset(token)


_AROUND: Final[ContextVar[Contender | None]] = ContextVar("around", default=None)
"""The transaction whose body runs."""


def is_inside_body() -> bool:
    """Tell whether the caller is inside the body of a transaction of `Store.transact`. Calls inside
    a body must not wait for other transactions.
    """
    around = _AROUND.get()
    return around is not None and around._is_running  # noqa: SLF001
