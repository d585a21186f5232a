"""Named readers of a stream. A reader's position is a record in the log, so that another process
can continue from it. `Streams.reader` returns a `Reader`, which reads by `Reading`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from bokistream.chain import StreamRecord
from bokistream.errors import StreamSettingsError
from bokistream.reading import Reading
from bokistream.records import FORMAT, Cursor, cursor_tag, decode_cursor
from bokistream.writer import trim_to_last
from indilog import Log, TrimmedError
from indilog.sdk import SeqNum

_COMMITS_PER_TRIM: Final = 64


class Reader:
    """A named reader, whose position is kept in the log. Get it with `Streams.reader`.

    Each record is read at least once: after a crash, reading continues after the record that was
    committed last. At most one process at a time should use a name. Two processes would read the
    same records, and the slower process would move the position back.

    Attributes:
        name: its name.
        done: seqnum that was committed last; all records up to it are processed. -1: none.
    """

    def __init__(self, reading: Reading, name: str, done: SeqNum) -> None:
        self.name = name
        self.done = done
        self._reading = reading
        self._commits = 0

    async def records(self, *, follow: bool = True) -> AsyncGenerator[StreamRecord, None]:
        """Yield the records after the last committed one.

        Args:
            follow: whether to wait for new records at the end, until the stream is sealed.

        Raises:
            IndilogError: as for `Streams.read`. After `StreamTruncatedError`, `commit` its
                `first_seqnum` - 1 to continue without the truncated records.
        """
        start = self._reading.bound
        reading = replace(
            self._reading,
            follow=follow,
            bound=self.done + 1 if self.done >= 0 else start,
            is_bound_given=self.done >= 0,
        )
        async with aclosing(reading.records()) as records:
            async for record in records:
                yield record

    async def commit(self, seqnum: SeqNum) -> None:
        """Record that all records up to `seqnum` are processed.

        Raises:
            StreamSettingsError: `seqnum` is below the last committed one, or is no seqnum.
            IndilogError: as for `Log.append`; committing again is harmless.
        """
        if type(seqnum) is not int or seqnum < max(self.done, 0):
            raise StreamSettingsError(
                f"Reader {self.name!r} has committed seqnum {self.done}, so it cannot commit "
                f"{seqnum!r:.40}; use Streams.read to read records again."
            )
        log, tag = self._reading.log, cursor_tag(self._reading.created, self.name)
        await log.append(FORMAT.encoded(Cursor(seqnum)), tags=[tag])
        self.done = seqnum
        self._commits += 1
        if self._commits % _COMMITS_PER_TRIM == 0:
            await trim_to_last(log, tag)


async def read_cursor(log: Log, created: SeqNum, reader: str) -> SeqNum:
    """Return the seqnum that a reader committed last; -1: none."""
    tag = cursor_tag(created, reader)
    try:
        last = await log.read_prev(tag, fresh=True)
    except TrimmedError:  # the stream was deleted
        return -1
    cursor = None if last is None else decode_cursor(last.data)
    return -1 if cursor is None else cursor.done
