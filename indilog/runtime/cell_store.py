"""Keeps the write-once cells of storage nodes, in one SQLite file for each node (decision 0085).

All questions that arrive during a transaction share the next transaction. Their answers are
delivered after the commit, which syncs the write-ahead log of SQLite. A question that changes
nothing is answered at once, from the committed contents. After a failure of the disk the node
refuses all questions until its process starts again, because a later sync could hide the failure.

On a full disk the transaction is rolled back, and executed again with the room of a reserve. Then
compute nodes are notified to write no more records, and the reserve is needed for what is in
progress. When it is used up, large cells with records are refused, and a second reserve is left for
trims, which are small cells, and for what makes them effective. When trims or an operator have made
room, both reserves are allocated again.

`NodeShell` passes the questions of other nodes to `CellStores`; backups read the files with
`CellReader`.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, assert_never
from urllib.parse import quote

import structlog

from indilog.base.ids import NodeId
from indilog.base.room_reserve import NO_ROOM, SMALL_CELL_BYTES, RoomReserve, TwoReserves
from indilog.config import Config
from indilog.kernel.cell_layout import spaces_of
from indilog.runtime.journal.segment import synced_directory
from indilog.wire.cell_messages import (
    CELLS_LISTED_MAX,
    CellAnswer,
    CellKey,
    CellKeysWanted,
    CellOutcome,
    CellQuestion,
    CellsDrop,
    CellSection,
    CellsSeal,
    CellsTrim,
    CellWanted,
    CellWrite,
)

_VERSION: Final = 1
_DIRECTORY: Final = "cells"
_LOG_BYTES: Final = 1200 * (4096 + 24)
"""Bytes allocated for a write-ahead log. SQLite begins to overwrite the log after the transaction
that reaches 1,000 pages; each page takes 4,096 bytes and a header of 24 bytes.
"""
_FREED_PAGES: Final = 256
"""Largest number of pages that a trim returns to the file system; further free pages are reused,
or returned while the disk is full.
"""
_FREED_PAGES_FULL: Final = 16 * _FREED_PAGES
"""Largest number of pages that are returned to a full disk at once."""
_TRIMS_BYTES: Final = 2 * _LOG_BYTES
"""Bytes of the second reserve. When the first one is used up, a whole write-ahead log may not be in
the main file yet.
"""
_NO_ROOM: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
"""Error numbers of SQLite on a full disk; the second one is of its file in shared memory."""
_SCHEMA: Final = """
CREATE TABLE spaces (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, epoch INTEGER NOT NULL,
    end INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE floors (
    space INTEGER NOT NULL, section INTEGER NOT NULL, floor INTEGER NOT NULL,
    PRIMARY KEY (space, section)
);
CREATE TABLE cells (
    space INTEGER NOT NULL, section INTEGER NOT NULL, position INTEGER NOT NULL,
    part INTEGER NOT NULL, crc INTEGER NOT NULL, content BLOB NOT NULL,
    PRIMARY KEY (space, section, position, part)
);
"""
_WHERE: Final = "WHERE space = ? AND section = ? AND position = ? AND part = ?"

_log = structlog.get_logger(__name__)


def cells_path(journal: Path, node: NodeId) -> Path:
    """Return the path of the file with a node's cells, in the directory `journal`."""
    return journal / _DIRECTORY / f"{node}.sqlite3"


class CellReader:
    """Reads the file of one node. The node's process may use the file at the same time.

    Args:
        path: the file.

    Raises:
        sqlite3.Error: there is no such file.
    """

    def __init__(self, path: Path | str) -> None:
        self._file = sqlite3.connect(
            f"file:{quote(str(path))}?mode=ro",
            uri=True,
            check_same_thread=False,
            isolation_level=None,
        )

    def answer(self, question: CellWanted | CellKeysWanted) -> CellAnswer:
        """Answer a question without a check of its epoch. The answer has the epoch of the space.

        Raises:
            sqlite3.Error: the file cannot be read.
        """
        self._file.execute("BEGIN")
        try:
            if (found := _space(self._file, question.space)) is None:
                return CellAnswer(question.request, CellOutcome.ABSENT)
            return _answer(self._file, *found, question)
        finally:
            self._file.execute("ROLLBACK")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class CellStore:
    """The cells of one node. One thread at a time may call `serve`, and another one `look_up`.

    Args:
        path: the file; it is created if it does not exist.
        syncs: whether commits are synced.

    Raises:
        sqlite3.Error: the file cannot be opened, or is damaged.
    """

    def __init__(self, path: Path | str, *, syncs: bool = True) -> None:
        self._file = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._path = path
        self._reader: CellReader | None = None
        self._file.execute("PRAGMA auto_vacuum = INCREMENTAL")
        # Else a trim writes zeros into all pages that it frees, which takes room.
        self._file.execute("PRAGMA secure_delete = OFF")
        self._file.execute("PRAGMA journal_mode = WAL")
        self._file.execute(f"PRAGMA synchronous = {'FULL' if syncs else 'OFF'}")
        (version,) = self._file.execute("PRAGMA user_version").fetchone()
        if version == 0:
            self._file.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version = {_VERSION};COMMIT;")
        elif version != _VERSION:
            raise sqlite3.DatabaseError(f"it has format {version}; this version reads {_VERSION}")
        if syncs and path != ":memory:":
            _allocate(Path(f"{path}-wal"))

    def close(self) -> None:
        """Close the file."""
        if self._reader is not None:
            self._reader.close()
        self._file.close()

    def look_up(self, question: CellQuestion) -> CellAnswer | None:
        """Answer a question that changes nothing; None: the question may change something.

        Raises:
            sqlite3.Error: the file cannot be read.
        """
        if not isinstance(question, CellWanted | CellKeysWanted):
            return None
        if self._reader is None:
            self._reader = CellReader(self._path)
        answer = self._reader.answer(question)
        if answer.outcome is CellOutcome.ABSENT or question.epoch > answer.epoch:
            return None
        if _is_refused(question, answer.epoch):
            return _sealed(question, answer.epoch, answer.end)
        return answer

    def serve(self, questions: Sequence[CellQuestion]) -> list[CellAnswer]:
        """Answer questions in one transaction, in order. When this returns, writes are durable.

        Raises:
            sqlite3.Error: nothing was done, or the outcome is unknown.
        """
        self._file.execute("BEGIN IMMEDIATE")
        try:
            answers = [self._serve(question) for question in questions]
            self._file.execute("COMMIT")
        except BaseException:
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")
            raise
        if any(isinstance(question, CellsTrim | CellsDrop) for question in questions):
            # `executescript`, because `execute` would free only one page.
            try:
                self._file.executescript(f"PRAGMA incremental_vacuum({_FREED_PAGES})")
            except sqlite3.Error as error:
                if error.sqlite_errorcode not in _NO_ROOM:
                    raise  # else pages are freed later
        return answers

    def free_pages(self) -> None:
        """Return pages of trimmed cells to the file system.

        Raises:
            sqlite3.Error: there is no room for this, or the disk failed.
        """
        for _ in range(_FREED_PAGES_FULL // _FREED_PAGES):
            self._file.executescript(f"PRAGMA incremental_vacuum({_FREED_PAGES})")
        self._file.execute("PRAGMA wal_checkpoint(PASSIVE)")  # this makes the file shorter

    def _serve(self, question: CellQuestion) -> CellAnswer:
        """Check the space and the epoch of a question, then answer it."""
        request, epoch = question.request, question.epoch
        if isinstance(question, CellsDrop):
            self._drop(question.space)
            return CellAnswer(request, CellOutcome.DONE)
        found = _space(self._file, question.space)
        if found is None and isinstance(question, CellsSeal) and question.opens:
            self._file.execute(
                "INSERT INTO spaces (name, epoch) VALUES (?, ?)", (question.space, epoch)
            )
            return CellAnswer(request, CellOutcome.DONE, epoch)
        if found is None:
            return CellAnswer(request, CellOutcome.ABSENT)
        if epoch > found[1]:
            self._file.execute("UPDATE spaces SET epoch = ? WHERE id = ?", (epoch, found[0]))
        space, known, end = found
        if _is_refused(question, known):
            return _sealed(question, known, end)
        outcome = CellOutcome.DONE
        match question:
            case CellWrite():
                outcome = self._write(space, end, question)
            case CellWanted() | CellKeysWanted():
                return _answer(self._file, space, max(epoch, known), end, question)
            case CellsTrim():
                self._trim(space, question)
            case CellsSeal():
                pass
            case unreachable:
                assert_never(unreachable)
        return CellAnswer(request, outcome, epoch, end=end)

    def _write(self, space: int, end: int, question: CellWrite) -> CellOutcome:
        key, content = question.key, question.content
        if key.position < _floor(self._file, space, key.section):
            return CellOutcome.TAKEN
        crc = zlib.crc32(content)
        if (stored := _stored(self._file, space, key)) is not None:
            if stored[1] == content:
                return CellOutcome.DONE
            if zlib.crc32(stored[1]) == stored[0]:
                return CellOutcome.TAKEN
            if stored[0] != crc:
                return CellOutcome.DAMAGED
            self._file.execute(
                f"UPDATE cells SET content = ? {_WHERE}",  # noqa: S608 - a constant
                (content, space, *_columns(key)),
            )
            return CellOutcome.DONE
        self._file.execute(
            "INSERT INTO cells VALUES (?, ?, ?, ?, ?, ?)", (space, *_columns(key), crc, content)
        )
        if key.section == CellSection.RECORDS and key.position >= end:
            self._raise_end(space, key.position + 1)
        return CellOutcome.DONE

    def _drop(self, folder: str) -> None:
        """Delete all spaces of a folder. No trace stays: an asker with an old layout gets `ABSENT`,
        which never means that a cell is unwritten.
        """
        start = spaces_of(folder)
        for (space,) in self._file.execute(
            "SELECT id FROM spaces WHERE substr(name, 1, ?) = ?", (len(start), start)
        ).fetchall():
            self._file.execute("DELETE FROM cells WHERE space = ?", (space,))
            self._file.execute("DELETE FROM floors WHERE space = ?", (space,))
            self._file.execute("DELETE FROM spaces WHERE id = ?", (space,))

    def _raise_end(self, space: int, end: int) -> None:
        self._file.execute("UPDATE spaces SET end = max(end, ?) WHERE id = ?", (end, space))

    def _trim(self, space: int, question: CellsTrim) -> None:
        section, until = question.section, question.until
        if until <= _floor(self._file, space, section):
            return
        self._file.execute(
            "DELETE FROM cells WHERE space = ? AND section = ? AND position < ?",
            (space, section, until),
        )
        self._file.execute(
            "INSERT OR REPLACE INTO floors VALUES (?, ?, ?)", (space, section, until)
        )
        if section == CellSection.RECORDS:
            self._raise_end(space, until)


def _space(file: sqlite3.Connection, name: str) -> tuple[int, int, int] | None:
    """Return the number, the epoch and the end of a space."""
    query = "SELECT id, epoch, end FROM spaces WHERE name = ?"
    found: tuple[int, int, int] | None = file.execute(query, (name,)).fetchone()
    return found


def _floor(file: sqlite3.Connection, space: int, section: int) -> int:
    found = file.execute(
        "SELECT floor FROM floors WHERE space = ? AND section = ?", (space, section)
    ).fetchone()
    return 0 if found is None else int(found[0])


def _stored(file: sqlite3.Connection, space: int, key: CellKey) -> tuple[int, bytes] | None:
    """Return the checksum and the content of a cell; None: the cell is not written."""
    found: tuple[int, bytes] | None = file.execute(
        f"SELECT crc, content FROM cells {_WHERE}",  # noqa: S608 - a constant
        (space, *_columns(key)),
    ).fetchone()
    return found


def _answer(
    file: sqlite3.Connection,
    space: int,
    epoch: int,
    end: int,
    question: CellWanted | CellKeysWanted,
) -> CellAnswer:
    """Answer a question that changes nothing."""
    request = question.request
    if isinstance(question, CellWanted):
        outcome, content = _read(file, space, question.key)
        return CellAnswer(request, outcome, epoch, content, end=end)
    listed = _list(file, space, question.section, question.after)
    floor = _floor(file, space, question.section)
    return CellAnswer(request, CellOutcome.DONE, epoch, b"", listed, floor, end)


def _is_refused(question: CellQuestion, known: int) -> bool:
    """Whether the epoch of a question is too old; `known` is the newest epoch of the space."""
    is_applied = isinstance(question, CellWanted) and question.is_applied
    return question.epoch < known and not is_applied


def _sealed(question: CellQuestion, known: int, end: int) -> CellAnswer:
    return CellAnswer(question.request, CellOutcome.SEALED, known, end=end)


def _read(file: sqlite3.Connection, space: int, key: CellKey) -> tuple[CellOutcome, bytes]:
    if key.position < _floor(file, space, key.section):
        return CellOutcome.TRIMMED, b""
    if (stored := _stored(file, space, key)) is None:
        return CellOutcome.UNWRITTEN, b""
    crc, content = stored
    if zlib.crc32(content) != crc:
        return CellOutcome.DAMAGED, b""
    return CellOutcome.DONE, content


def _list(
    file: sqlite3.Connection, space: int, section: int, after: CellKey | None
) -> tuple[CellKey, ...]:
    start = (-1, 0) if after is None else (after.position, after.part)
    found = file.execute(
        "SELECT position, part FROM cells WHERE space = ? AND section = ?"
        " AND (position, part) > (?, ?) ORDER BY position, part LIMIT ?",
        (space, section, *start, CELLS_LISTED_MAX),
    )
    return tuple(CellKey(section, position, part) for position, part in found)


def _allocate(log: Path) -> None:
    """Append zeros to a write-ahead log, up to the size at which SQLite begins to overwrite it.

    A sync of a file that grows takes several times as long. SQLite reads a log up to the first
    frame without a valid checksum, so it does not take the zeros for frames. If the disk is full,
    the log stays as it is.
    """
    if not log.exists():
        return
    with log.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            file.write(bytes(max(0, _LOG_BYTES - size)))
            os.fsync(file.fileno())
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            file.truncate(size)


def _columns(key: CellKey) -> tuple[int, int, int]:
    """Return the columns of a key."""
    return key.section, key.position, key.part


class _Served:
    """The questions to one node, and the node's `CellStore`.

    Attributes:
        waiting: questions for the next transaction, with their senders.
        waiting_bytes: approximate bytes of `waiting` (`size_of`).
        is_busy: whether the node's thread is working.
        is_full: whether the disk is full, so that a reserve is in use.
    """

    def __init__(self, path: Path, *, reserve_bytes: int, syncs: bool) -> None:
        self.waiting: list[tuple[NodeId, CellQuestion]] = []
        self.waiting_bytes = 0
        self.is_busy = False
        self.is_full = False
        self._path, self._syncs = path, syncs
        self._reserves = TwoReserves(
            RoomReserve(path.with_suffix(".reserve"), reserve_bytes),
            RoomReserve(path.with_suffix(".trims"), _TRIMS_BYTES),
        )
        self._store: CellStore | None = None
        self._failed = False

    def serve(self, questions: Sequence[CellQuestion]) -> list[CellAnswer]:
        """Answer questions. Called only in the node's thread."""
        while not self._failed:
            try:
                if self._store is None:
                    if not self._path.exists() and not any(map(_opens, questions)):
                        return [CellAnswer(q.request, CellOutcome.ABSENT) for q in questions]
                    self._store = self._opened()
                return self._store.serve(questions)
            except (sqlite3.Error, OSError) as error:
                if not self._is_full_disk(error):
                    continue
                self.is_full = True
                is_large = any(map(_is_large, questions))
                if self._reserves.release(is_large=is_large):
                    continue
                if is_large:
                    return self._serve_small(questions)
                break
        return [CellAnswer(q.request, CellOutcome.REFUSED) for q in questions]

    def _serve_small(self, questions: Sequence[CellQuestion]) -> list[CellAnswer]:
        """Answer questions, but refuse large cells."""
        answers = iter(self.serve([q for q in questions if not _is_large(q)]))
        return [
            CellAnswer(q.request, CellOutcome.REFUSED) if _is_large(q) else next(answers)
            for q in questions
        ]

    def _opened(self) -> CellStore:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self.is_full:
            self.is_full = not self._keep_reserves()
        store = CellStore(self._path, syncs=self._syncs)
        if self._syncs:  # SQLite does not sync the names of directories
            synced_directory(self._path.parent)
            synced_directory(self._path.parent.parent)
        return store

    def _keep_reserves(self) -> bool:
        """Allocate the reserves; return whether both are allocated. A file system that cannot
        allocate a file has none.
        """
        try:
            return self._reserves.keep()
        except OSError as error:
            _log.warning("no room is reserved for a full disk", reason=str(error))
            return True

    def make_room(self) -> None:
        """Find out whether the disk is still full. Called only in the node's thread."""
        if self._failed:
            self.is_full = False
            return
        try:
            if self._store is not None:
                self._store.free_pages()
            self.is_full = not self._keep_reserves()
        except (sqlite3.Error, OSError) as error:
            self._is_full_disk(error)

    def _is_full_disk(self, error: sqlite3.Error | OSError) -> bool:
        """Whether a full disk caused an error. Any other one ends the service of this node."""
        if isinstance(error, OSError):
            is_full = error.errno in NO_ROOM
        else:
            code = getattr(error, "sqlite_errorcode", None)
            is_full = code in _NO_ROOM
            if code == sqlite3.SQLITE_IOERR_WRITE:  # so SQLite reports an exhausted quota
                is_full = not self._reserves.has_room()
        if not is_full:
            self._failed = True
            _log.exception("cells cannot be served", file=str(self._path))
        return is_full

    def look_up(self, question: CellQuestion) -> CellAnswer | None:
        """Answer a question at once. Called only on the event loop. None: the question must wait
        for a transaction.
        """
        if self._failed or self._store is None:
            return None
        try:
            return self._store.look_up(question)
        except sqlite3.Error:
            return None  # `serve` reports the failure

    def close(self) -> None:
        """Close the file."""
        if self._store is not None:
            self._store.close()


def _opens(question: CellQuestion) -> bool:
    return isinstance(question, CellsSeal) and question.opens


def _is_large(question: CellQuestion) -> bool:
    if not isinstance(question, CellWrite) or question.key.section != CellSection.RECORDS:
        return False
    return len(question.content) > SMALL_CELL_BYTES


def size_of(question: CellQuestion) -> int:
    """Return the approximate number of bytes that a waiting question takes."""
    return 256 + (len(question.content) if isinstance(question, CellWrite) else 0)


class CellStores:
    """Answers questions about the cells of a process's storage nodes. Each node has its own thread.

    Args:
        journal: directory of the journal; the files are in its directory `cells`.
        config: limits, and whether commits are synced.
        deliver: called on the event loop with the node, the sender of the question and the answer.
        note_full: called on the event loop when the disk has become full (True), and when it has
            room again.
    """

    def __init__(
        self,
        journal: Path,
        config: Config,
        deliver: Callable[[NodeId, NodeId, CellAnswer], None],
        note_full: Callable[[bool], None],
    ) -> None:
        self._journal = journal
        self._config = config.node.cells
        self._deliver = deliver
        self._note_full = note_full
        self._is_full = False
        # When the disk gets full, up to a whole write-ahead log is not in the main file yet.
        self._reserve_bytes = _LOG_BYTES + config.node.journal.disk_reserve_bytes
        self._retry_s = config.node.journal.disk_retry_s
        self._retry: asyncio.TimerHandle | None = None
        self._syncs = config.cluster.durability == "fsync"
        self._served: dict[NodeId, _Served] = {}
        self._threads: dict[NodeId, ThreadPoolExecutor] = {}
        self._running: set[asyncio.Future[Any]] = set()
        self._closed = False

    def ask(self, node: NodeId, sender: NodeId, question: CellQuestion) -> None:
        """Answer the question of `sender` to `node`.

        A question that changes nothing is answered at once. If too many questions wait, the
        question is refused at once. All other questions are answered after a transaction.
        """
        if (served := self._served.get(node)) is None:
            path = cells_path(self._journal, node)
            served = self._served[node] = _Served(
                path, reserve_bytes=self._reserve_bytes, syncs=self._syncs
            )
            self._threads[node] = ThreadPoolExecutor(1, thread_name_prefix="cells")
        if (answer := served.look_up(question)) is not None:
            self._deliver(node, sender, answer)
            return
        size = served.waiting_bytes + size_of(question)
        limits = self._config.cell_requests_max, self._config.cell_request_bytes_max
        if len(served.waiting) >= limits[0] or (served.waiting and size > limits[1]):
            self._deliver(node, sender, CellAnswer(question.request, CellOutcome.REFUSED))
            return
        served.waiting.append((sender, question))
        served.waiting_bytes = size
        if not served.is_busy:
            self._begin(node, served)

    def _begin(self, node: NodeId, served: _Served) -> None:
        asked, served.waiting, served.waiting_bytes = served.waiting, [], 0
        served.is_busy = True
        questions = [question for _, question in asked]
        running = asyncio.get_running_loop().run_in_executor(
            self._threads[node], served.serve, questions
        )
        self._running.add(running)

        def done(future: asyncio.Future[list[CellAnswer]]) -> None:
            self._running.discard(future)
            served.is_busy = False
            if self._closed or future.cancelled():
                return
            for (sender, _), answer in zip(asked, future.result(), strict=True):
                self._deliver(node, sender, answer)
            self._note_disk()
            if served.waiting:
                self._begin(node, served)

        running.add_done_callback(done)

    def _note_disk(self) -> None:
        """Report whether a node has used its reserve, and look for room later in this case."""
        is_full = any(served.is_full for served in self._served.values())
        if is_full != self._is_full:
            self._is_full = is_full
            self._note_full(is_full)
        if is_full and self._retry is None:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(self._retry_s, self._look_for_room)

    def _look_for_room(self) -> None:
        self._retry = None
        loop = asyncio.get_running_loop()
        for node, served in self._served.items():
            if served.is_full:
                looking = loop.run_in_executor(self._threads[node], served.make_room)
                self._running.add(looking)
                looking.add_done_callback(self._looked)

    def _looked(self, looking: asyncio.Future[None]) -> None:
        self._running.discard(looking)
        if not self._closed and not looking.cancelled():
            looking.result()
            self._note_disk()

    async def close(self) -> None:
        """Stop after the transactions in progress have ended."""
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        if self._running:
            await asyncio.wait(self._running)
        for node, thread in self._threads.items():
            thread.submit(self._served[node].close)
            thread.shutdown()
