"""Serves the cold storage requests of storage nodes, in threads (decision 0039).

An *object* is a Parquet file with old record batches of one shard, in a directory or an
S3-compatible store. Reads have threads of their own, so that writes do not delay them. A read that
takes longer than `cold_timeout_s` is answered as *away*; its thread may still wait. The row group
of each batch that was read stays in a cache, because the next read often needs a neighbour of that
batch.

pyarrow is imported only inside functions, because the import takes long and most nodes have no cold
storage. `NodeShell` passes requests to `ColdStore`, which uses `indilog.runtime.cold_place`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar, assert_never

import structlog

from indilog.base.errors import ConfigError, MalformedFrameError
from indilog.base.ids import LocalId, NodeId
from indilog.config import Config
from indilog.kernel.cold import (
    VERSION,
    ColdAnswer,
    ColdBatchRead,
    ColdObject,
    ColdRequest,
    ColdTagsRead,
    DeleteObject,
    ListObjects,
    ObjectDeleted,
    ObjectsListed,
    ObjectWritten,
    ReadColdBatch,
    ReadColdTags,
    WriteObject,
    object_named,
    without_store,
)
from indilog.runtime.cold_place import (
    ColdFolder,
    ColdNote,
    ColdStoreError,
    MissingObjectError,
    OpenObject,
    folders_noted,
    new_folders,
)

if TYPE_CHECKING:
    from indilog.kernel.cold_objects import ObjectReader

_OPEN_OBJECTS_MAX: Final = 64
"""Objects whose footers and files are kept open; the least recently used one is closed."""

log = structlog.get_logger(__name__)

_Request = TypeVar("_Request", bound=ColdRequest)


class ColdObjects:
    """The objects of one node; its methods block and may run in several threads.

    Args:
        folder: folder of the objects.
        cache_bytes_max: bytes of batches that are cached.
        note: the file `COLD` of the journal, which names the place of all objects; it is written
            before the first object.
    """

    def __init__(self, folder: ColdFolder, cache_bytes_max: int, note: ColdNote) -> None:
        self._folder = folder
        self._note = note
        self._cache_bytes_max = cache_bytes_max
        self._lock = threading.Lock()
        """Held while the two caches are used, never during a request to the store."""
        self._readers: OrderedDict[int, ObjectReader] = OrderedDict()
        self._groups: OrderedDict[tuple[int, int], dict[LocalId, bytes]] = OrderedDict()
        self._cached_bytes = 0

    def list(self, request: ListObjects) -> ObjectsListed:
        """Return all objects of the node; None: the store does not answer."""
        del request
        if not self._note.is_written:
            return ObjectsListed(())  # no object was ever written
        try:
            found = self._folder.list()
        except ColdStoreError as error:
            log.warning("cold storage cannot be listed", error=str(error))
            return ObjectsListed(None)
        named = (object_named(name, size) for name, size in found)
        return ObjectsListed([one for one in named if one is not None])

    def write(self, request: WriteObject) -> ObjectWritten:
        """Write an object. The answer says whether the write failed. `unfit` says that every retry
        would fail too.
        """
        from indilog.kernel.cold_objects import encode_object
        from indilog.kernel.records import batch_header

        number, shard, batches = request
        try:
            content, footer_crc = encode_object(batches)
        except MalformedFrameError as error:
            log.warning("records cannot be moved to cold storage", shard=shard, error=str(error))
            return ObjectWritten(number, None, unfit=True)
        first = batch_header(batches[0].payload)
        last = batch_header(batches[-1].payload)
        made = ColdObject(
            VERSION, number, shard, first.first, last.end, len(content), footer_crc,
            *_witness(request),
        )  # fmt: skip
        try:
            self._note.write(self._folder)
            self._folder.write(made.name, content)
        except (ColdStoreError, OSError) as error:
            log.warning("no records are moved to cold storage for now", error=str(error))
            return ObjectWritten(number, None)
        return ObjectWritten(number, made)

    def read(self, request: ReadColdBatch) -> ColdBatchRead:
        """Return a batch.

        The answer has None if the object is missing, and an empty batch if the object is damaged.
        In both cases the node repairs the batch from another replica. `away` says that the store
        does not answer, so nothing is known about the object.
        """
        token, source, first = request
        try:
            return ColdBatchRead(token, self._batch(source, first))
        except MissingObjectError as error:
            log.warning("an object is missing from cold storage", object=str(error))
            return ColdBatchRead(token, None)
        except MalformedFrameError as error:
            log.warning("an object on cold storage is damaged", name=source.name, error=str(error))
            return ColdBatchRead(token, b"")
        except ColdStoreError as error:
            log.warning("cold storage does not answer", error=str(error))
            return ColdBatchRead(token, None, away=True)

    def _batch(self, source: ColdObject, first: LocalId) -> bytes:
        reader = self._reader(source)
        if (group := reader.group_of(first)) is None:
            raise MalformedFrameError(f"it has no record {first}")
        key = source.number, group
        with self._lock:
            batches = self._groups.get(key)
            if batches is not None:
                self._groups.move_to_end(key)
        if batches is None:
            batches = reader.batches(group)
            self._keep(key, batches)
        if (batch := batches.get(first)) is None:
            raise MalformedFrameError(f"it has no batch that begins at {first}")
        return batch

    def _keep(self, key: tuple[int, int], batches: dict[LocalId, bytes]) -> None:
        size = _bytes_of(batches)
        with self._lock:
            if key in self._groups or size > self._cache_bytes_max:
                return
            self._groups[key] = batches
            self._cached_bytes += size
            while self._cached_bytes > self._cache_bytes_max:
                _, dropped = self._groups.popitem(last=False)
                self._cached_bytes -= _bytes_of(dropped)

    def _reader(self, source: ColdObject) -> ObjectReader:
        from indilog.kernel.cold_objects import ObjectReader

        with self._lock:
            if (known := self._readers.get(source.number)) is not None:
                self._readers.move_to_end(source.number)
                return known
        opened: OpenObject = self._folder.open(source.name)
        reader = ObjectReader(opened.size, source.footer_crc, opened.read)
        with self._lock:
            self._readers[source.number] = reader
            if len(self._readers) > _OPEN_OBJECTS_MAX:
                self._readers.popitem(last=False)
        return reader

    def tags(self, request: ReadColdTags) -> ColdTagsRead:
        """Return the tags of an object; None: they cannot be read at present."""
        try:
            return ColdTagsRead(request.source.number, self._reader(request.source).tags())
        except (MissingObjectError, MalformedFrameError, ColdStoreError) as error:
            log.warning("tags on cold storage cannot be read", error=str(error))
            return ColdTagsRead(request.source.number, None)

    def delete(self, request: DeleteObject) -> ObjectDeleted:
        """Delete an object. The answer says whether it no longer exists."""
        number = request.source.number
        with self._lock:
            self._readers.pop(number, None)
            for key in [key for key in self._groups if key[0] == number]:
                self._cached_bytes -= _bytes_of(self._groups.pop(key))
        try:
            self._folder.delete(request.source.name)
        except ColdStoreError as error:
            log.warning("trimmed records stay on cold storage for now", error=str(error))
            return ObjectDeleted(number, done=False)
        return ObjectDeleted(number, done=True)


def _bytes_of(batches: dict[LocalId, bytes]) -> int:
    return sum(map(len, batches.values()))


def _witness(request: WriteObject) -> tuple[int, bytes]:
    """Return the seqnum and the tags of the last record with tags in an object."""
    from indilog.base.ids import HASH_BYTES
    from indilog.kernel.records import RecordBatch

    for batch in reversed(request.batches):
        counts, tags = RecordBatch(batch.payload).tag_columns()
        for index in range(len(counts) - 1, -1, -1):
            if counts[index]:
                return batch.seqnum + index, tags[-HASH_BYTES * counts[index] :]
    return request.batches[-1].seqnum, b""


class ColdStore:
    """Answers the requests of the storage nodes of a process.

    Args:
        journal: directory of the journal; its file `COLD` names the place of objects.
        wait_synced: waits until everything written to the journal is synced; returns False if the
            process ends.
        deliver: called on the event loop with each answer.

    Raises:
        ConfigError: the configured place differs from the place of the existing objects.
        DataDirectoryError: the file `COLD` is damaged.
    """

    def __init__(
        self,
        journal: Path,
        config: Config,
        wait_synced: Callable[[], Awaitable[bool]],
        deliver: Callable[[NodeId, ColdAnswer], None],
    ) -> None:
        self._journal = journal
        self._config = config.node.cold
        self._wait_synced = wait_synced
        self._deliver = deliver
        self._note: ColdNote | None = None
        if (folders := folders_noted(journal)) is not None:
            if self._config.cold_place not in ("", folders.place):
                raise ConfigError(
                    f"The old records of {journal} are in {folders.place}, and cold_place is "
                    f"{self._config.cold_place}; set cold_place to the former."
                )
            self._note = ColdNote(journal, folders, is_written=True)
        self._nodes: dict[NodeId, ColdObjects] = {}
        self._reading: ThreadPoolExecutor | None = None
        """The `cold_requests_max` threads that read batches."""
        self._other: ThreadPoolExecutor | None = None
        """One thread for all other requests, so that these take effect in their order."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: set[Future[ColdAnswer]] = set()
        """Requests that run in a thread, or wait for one."""

    def ask(self, node: NodeId, request: ColdRequest) -> None:
        """Serve a request of a node. Its answer is delivered later; without cold storage, at
        once.
        """
        if (objects := self._of(node, request)) is None:
            self._deliver(node, without_store(request))
            return
        if self._reading is None or self._other is None:
            self._reading = ThreadPoolExecutor(
                self._config.cold_requests_max, thread_name_prefix="cold-read"
            )
            self._other = ThreadPoolExecutor(1, thread_name_prefix="cold-write")
        task = asyncio.get_running_loop().create_task(
            self._serve(node, objects, request, self._reading, self._other)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _of(self, node: NodeId, request: ColdRequest) -> ColdObjects | None:
        """Return the objects of a node. None: no place is known, or the file `COLD` is missing."""
        if (known := self._nodes.get(node)) is not None:
            return known
        if self._note is None:
            if not self._config.cold_place:
                return None
            if isinstance(request, ListObjects) and not request.is_first:
                log.error("the file COLD of the journal is missing", journal=str(self._journal))
                return None
            folders = new_folders(self._config.cold_place)
            self._note = ColdNote(self._journal, folders, is_written=False)
        folders = self._note.folders
        folder = ColdFolder(folders.place, folders.of(node), self._config.cold_timeout_s)
        self._nodes[node] = ColdObjects(folder, self._config.cold_cache_bytes_max, self._note)
        return self._nodes[node]

    async def close(self) -> None:
        """Stop, and wait at most `cold_timeout_s` for the work of the threads.

        A write in progress may leave its object complete or missing. Both are correct, because no
        frame of the journal names the object. But the object must not appear after the next
        incarnation has listed the objects. That incarnation would not know the object; only a later
        start would delete it.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for executor in (self._reading, self._other):
            if executor is not None:
                executor.shutdown(wait=False, cancel_futures=True)
        if not (works := [asyncio.wrap_future(work) for work in tuple(self._running)]):
            return
        _, late = await asyncio.wait(works, timeout=self._config.cold_timeout_s)
        if late:
            log.warning(
                "cold storage does not answer; stopped with open requests", requests=len(late)
            )
        for work in works:
            work.cancel()  # the thread must not call a loop that is closed

    def _run(
        self,
        executor: ThreadPoolExecutor,
        work: Callable[[_Request], ColdAnswer],
        request: _Request,
    ) -> asyncio.Future[ColdAnswer]:
        """Serve a request in a thread. `close` waits for its end."""
        running = executor.submit(work, request)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return asyncio.wrap_future(running)

    async def _serve(
        self,
        node: NodeId,
        objects: ColdObjects,
        request: ColdRequest,
        reading: ThreadPoolExecutor,
        other: ThreadPoolExecutor,
    ) -> None:
        match request:
            case ReadColdBatch(token):
                read = self._run(reading, objects.read, request)
                try:
                    done, _ = await asyncio.wait([read], timeout=self._config.cold_timeout_s)
                finally:
                    read.cancel()  # if it has not begun
                answer = read.result() if done else ColdBatchRead(token, None, away=True)
            case ReadColdTags():
                answer = await self._run(other, objects.tags, request)
            case ListObjects():
                answer = await self._run(other, objects.list, request)
            case WriteObject():
                answer = await self._run(other, objects.write, request)
            case DeleteObject():
                if not await self._wait_synced():
                    return
                answer = await self._run(other, objects.delete, request)
            case unreachable:
                assert_never(unreachable)
        self._deliver(node, answer)
