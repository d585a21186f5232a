"""Lines in the log: the order in which processes change an object in conflict.

The lines of a process (`bokistore.lines`) order its own transactions. Lines in the log order the
transactions of different processes. After `LOSSES_MAX` conflicts of a transaction, its process
appends a record with a random token. The token enters the line of each object in conflict. While
the token is in the line of an object, processes behave so:

- If `Store.transact` reads the object in a snapshot with this line, it conflicts and enters the
  line, too. The transaction runs again when its own token is the first.
- A block of `Store.transaction` does not enter the line. If the object is the first that the block
  reads, the block waits until the present tokens have left the line, at most `LOG_TURN_S`.
- A single operation waits in the same way, if its process knows the line.
- No call inside the body of another transaction waits.

A transaction whose snapshot is before the token's record does not wait. After that record, at most
one of these transactions can read and change the object, because its change conflicts with all the
others.

The line is a function of the object's sub-stream, like its value. It does not decide whether a
transaction takes effect. So a process that ignores lines can delay others, but every replay has the
same result. There is no deadlock, for two reasons. One record enters all lines of a token, so two
tokens have the same order in all lines. A transaction that has entered lines does not wait for
further objects.

A place ends with the commit of its holder, or `LOG_TURN_S` after it became the first in its line,
by the time of the log. So a crashed holder delays others by that time at most. `Contender` and
`Transaction` use `LogTurn`, which reads lines by `ObjectReplay`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple, Protocol

from indilog import IndilogError, Log
from indilog.sdk import SeqNum

LOG_TURN_S: Final = 2.0
"""Seconds, by the time of the log, after which the first in the line of an object loses its
place.
"""
LOG_LINE_MAX: Final = 64
"""Tokens in the line of one object; a further one does not enter."""
LOG_LINES_MAX: Final = 32
"""Lines that one record enters, at most. Each line uses one of the 64 tags of the record."""
LOSSES_MAX: Final = 3
"""Conflicts after which a call of `transact` enters lines in the log."""
_TOKEN_BYTES: Final = 8


class LinePlace(NamedTuple):
    """A place in the line of an object.

    Attributes:
        token: identity of its holder.
        since: when its holder entered the line, or when it became the first place; seconds since
            1970, by the time of the log.
    """

    token: str
    since: float


Line = tuple[LinePlace, ...]


def standing(line: Line, now: float) -> Line:
    """Return the places of a line that have not ended at time `now`."""
    end = 0.0
    for number, place in enumerate(line):
        since = max(place.since, end)
        end = since + LOG_TURN_S
        if end > now:
            return (place._replace(since=since), *line[number + 1 :])
    return ()


def entered(line: Line, token: str, now: float) -> Line:
    """Return a line after a record at time `now` by which a token enters."""
    line = standing(line, now)
    if len(line) >= LOG_LINE_MAX or token in tokens_of(line):
        return line
    return (*line, LinePlace(token, now))


def left(line: Line, token: str, now: float) -> Line:
    """Return a line after a record at time `now` by which a token leaves."""
    line = standing(line, now)
    rest = tuple([place for place in line if place.token != token])
    if rest and rest[0] != line[0]:
        rest = (rest[0]._replace(since=max(rest[0].since, now)), *rest[1:])
    return rest


def tokens_of(line: Line) -> frozenset[str]:
    """Return the tokens in a line."""
    return frozenset([place.token for place in line])


class LineLog(Protocol):
    """The part of the replay of a log of objects that lines use (`bokistore.replay`)."""

    def tag(self, name: str) -> str:
        """Return the tag of an object's records."""

    def forget_line(self, name: str, seqnum: SeqNum) -> None:
        """Remove all places of a line from the cached view as of `seqnum`. The caller knows that
        they have ended.
        """

    async def line(self, name: str) -> tuple[SeqNum, Line]:
        """Return the last record of an object's sub-stream, and the line as of that record."""

    async def append_line(
        self, token: str, *, enters: Sequence[str] = (), leaves: Sequence[str] = ()
    ) -> None:
        """Append a record by which a token enters and leaves lines."""


class LogTurn:
    """The places of one process in the lines of some objects, with one token.

    Attributes:
        token: the token.
        names: the objects whose lines it has entered and not left.
    """

    def __init__(self, log: Log, lines: LineLog) -> None:
        self._log = log
        self._lines = lines
        self.token = secrets.token_hex(_TOKEN_BYTES)
        self.names: list[str] = []

    async def acquire(self, names: Iterable[str]) -> None:
        """Enter the lines of objects, and return when the token is the first in each of them, or
        has lost its place.
        """
        self.names = sorted(names)[:LOG_LINES_MAX]
        await self._lines.append_line(self.token, enters=self.names)
        for name in self.names:
            await self._wait_until_first(name)

    async def _wait_until_first(self, name: str) -> None:
        while True:
            seqnum, line = await self._lines.line(name)
            now = await self._log.now()
            line = standing(line, now)
            if self.token not in tokens_of(line) or line[0].token == self.token:
                return
            await wait_for_record(self._log, self._lines, name, seqnum, line[0], now)

    def note_left(self, names: Iterable[str]) -> None:
        """Note that a committed record has left the lines of some objects."""
        gone = set(names)
        self.names = [name for name in self.names if name not in gone]

    async def release(self) -> None:
        """Leave the lines in which the token still has a place. If the log does not answer, each
        place ends `LOG_TURN_S` after it became the first.
        """
        names, self.names = self.names, []
        if names:
            with suppress(IndilogError):
                await self._lines.append_line(self.token, leaves=names)


async def wait_for_record(
    log: Log, lines: LineLog, name: str, seqnum: SeqNum, first: LinePlace, now: float
) -> None:
    """Wait for a record of an object after `seqnum`, at most until the first place ends."""
    await log.read_next(lines.tag(name), seqnum + 1, wait=max(0.0, first.since + LOG_TURN_S - now))


async def wait_for_those_before(log: Log, lines: LineLog, name: str) -> None:
    """Wait until the tokens that stand in the line of an object now have left, at most
    `LOG_TURN_S`.
    """
    seqnum, line = await lines.line(name)
    now = await log.now()
    line = standing(line, now)
    if not line:
        lines.forget_line(name, seqnum)
    before, until = tokens_of(line), now + LOG_TURN_S
    while line and line[0].token in before and now < until:
        end = line[0]._replace(since=min(line[0].since, until - LOG_TURN_S))
        await wait_for_record(log, lines, name, seqnum, end, now)
        seqnum, line = await lines.line(name)
        now = await log.now()
        line = standing(line, now)
