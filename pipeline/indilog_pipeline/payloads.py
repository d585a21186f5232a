"""Reads the batches of an image from their files, also while a platform replaces these files
(decision 0035).

`record_batches`, `index_rows` and `backup` use `Payloads`. `cold_payloads` reads batches on cold
storage for it.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from indilog.base.errors import NotReadyError
from indilog.base.ids import SeqNum
from indilog.kernel.batch_columns import BatchColumns, Expected
from indilog_pipeline.cold_payloads import ColdPayloads
from indilog_pipeline.journals import ATTEMPTS_MAX
from indilog_pipeline.log_image import NO_FILE, BatchPlaces, ColdFile, LogImage

ROWS: Final = 65_536
BYTES: Final = 16 * 1024 * 1024
"""A chunk has at most this many records and bytes, but at least one batch."""
_GAP_BYTES: Final = 64 * 1024
"""Largest gap between two batches, in unneeded bytes, that one read still covers."""
_OPEN_FILES_MAX: Final = 64


class Chunk(NamedTuple):
    """The batches of seqnums `[start, stop)`.

    Attributes:
        image: the image of the batches.
        batches: places of the batches. The first and the last batch may exceed the range.
        columns: the content of the batches.
        broken: batches with damaged data, by their index in `columns.batches`; only if data was
            requested.
    """

    start: SeqNum
    stop: SeqNum
    image: LogImage
    batches: BatchPlaces
    columns: BatchColumns
    broken: list[int]


class Payloads:
    """Reads chunks of an image; a damaged batch is taken from another replica.

    If a batch cannot be read, a platform may have moved or discarded it. So the image is read
    again. If the new image names the same places for the batch, the batch counts as damaged.

    Attributes:
        image: the image that was read last.
    """

    def __init__(self, image: LogImage) -> None:
        self.image = image
        self._fds: dict[int, int] = {}
        self._cold = ColdPayloads()

    def close(self) -> None:
        """Close all files."""
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()
        self._cold.close()

    def chunk(self, start: SeqNum, end: SeqNum, *, with_data: bool) -> Chunk:
        """Return the first part of `[start, end)`, as large as a chunk may be.

        Raises:
            NotReadyError: a platform moved batches during each of several attempts, or cold
                storage does not answer.
            DataDirectoryError, DataLossError: as `LogImage.read`.
        """
        seen: set[object] = set()
        for _ in range(ATTEMPTS_MAX):
            chunk = self._chunk(start, end, with_data=with_data)
            broken = chunk.columns.damaged
            broken = np.concatenate((broken, chunk.columns.batches[chunk.broken]))
            places = {
                (self.image.files[file], offset)
                for row in broken.tolist()
                for file, offset in zip(
                    chunk.batches.files[row].tolist(),
                    chunk.batches.offsets[row].tolist(),
                    strict=True,
                )
                if file != NO_FILE
            }
            if places <= seen:
                return chunk
            seen |= places
            self.close()
            self.image = LogImage.read(self.image.directory)
        raise NotReadyError(
            f"The platform that uses {self.image.directory} moved records during {ATTEMPTS_MAX} "
            "attempts to read them; try again."
        )

    def _chunk(self, start: SeqNum, end: SeqNum, *, with_data: bool) -> Chunk:
        image = self.image
        rows = image.rows_of(start, end)
        rows = rows[: _rows_at_once(image.batches.part(rows.start, rows.stop))]
        batches = image.batches.part(rows.start, rows.stop)
        following = image.batches.seqnums[rows.stop : rows.stop + 1].tolist()
        stop = min([end, *following]) if rows else end
        has = batches.files != NO_FILE
        first = has.argmax(axis=1)
        payloads = self._fetch(batches, first)
        columns = BatchColumns(payloads, _expected(batches))
        broken = columns.damaged_data() if with_data else []
        for replica in range(1, batches.files.shape[1]):
            bad = np.concatenate((columns.damaged, columns.batches[broken]))
            if not len(bad):
                break
            if self._replace(payloads, batches, bad, replica, with_data=with_data):
                columns = BatchColumns(payloads, _expected(batches))
                broken = columns.damaged_data() if with_data else []
        return Chunk(start, stop, image, batches, columns, broken)

    def _replace(
        self,
        payloads: list[memoryview | None],
        batches: BatchPlaces,
        bad: NDArray[np.intp],
        replica: int,
        *,
        with_data: bool,
    ) -> bool:
        """Replace bad batches by copies of another replica; return whether any copy was intact."""
        some = BatchPlaces._make(column[bad] for column in batches)
        found = self._fetch(some, np.full(len(bad), replica))
        columns = BatchColumns(found, _expected(some))
        intact = set(columns.batches.tolist())
        if with_data:
            intact -= set(columns.batches[columns.damaged_data()].tolist())
        for index in intact:
            payloads[bad[index]] = found[index]
        return bool(intact)

    def _fetch(self, batches: BatchPlaces, replicas: NDArray[np.intp]) -> list[memoryview | None]:
        """Read each batch from one of its replicas; None: the copy is missing or unreadable."""
        every = np.arange(len(replicas))
        files = batches.files[every, replicas]
        offsets = batches.offsets[every, replicas]
        ends = offsets + batches.lengths[every, replicas]
        order = np.lexsort((offsets, files))
        apart = np.flatnonzero(
            (np.diff(files[order]) != 0) | (offsets[order][1:] - ends[order][:-1] > _GAP_BYTES)
        )
        found: list[memoryview | None] = [None] * len(every)
        for rows in np.split(order, apart + 1):
            if len(rows) and files[rows[0]] != NO_FILE:
                self._fetch_run(int(files[rows[0]]), rows, offsets, ends, found)
        return found

    def _fetch_run(
        self,
        file: int,
        rows: NDArray[np.intp],
        offsets: NDArray[np.int64],
        ends: NDArray[np.int64],
        found: list[memoryview | None],
    ) -> None:
        """Read neighbouring batches of a file at once. If this fails, read them one by one."""
        if isinstance(source := self.image.files[file], ColdFile):
            for row in rows.tolist():
                found[row] = self._cold.batch(source, int(offsets[row]))
            return
        start, end = int(offsets[rows].min()), int(ends[rows].max())
        try:
            buffer = memoryview(os.pread(self._fd(file), end - start, start))
        except OSError:
            if len(rows) > 1:
                for row in rows:
                    self._fetch_run(file, np.array([row]), offsets, ends, found)
            return
        places = zip(
            rows.tolist(), (offsets[rows] - start).tolist(), (ends[rows] - start).tolist(),
            strict=True,
        )  # fmt: skip
        for row, first, after in places:
            found[row] = buffer[first:after]

    def _fd(self, file: int) -> int:
        if (fd := self._fds.get(file)) is None:
            if len(self._fds) >= _OPEN_FILES_MAX:
                os.close(self._fds.pop(next(iter(self._fds))))
            path = self.image.files[file]
            assert not isinstance(path, ColdFile), "an object is no file"
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._fds[file] = fd
        return fd


def _rows_at_once(batches: BatchPlaces) -> int:
    """Return how many of the first batches make a chunk."""
    by_records = int(np.searchsorted(np.cumsum(batches.records), ROWS, side="right"))
    by_bytes = int(np.searchsorted(np.cumsum(batches.bytes), BYTES, side="right"))
    return max(1, min(by_records, by_bytes))


def _expected(batches: BatchPlaces) -> Expected:
    return Expected(batches.shards, batches.localids, batches.records)
