"""A simulated platform whose logs are switched between kinds: the real catalog, routes, segments
and cells, on a simulated clock and network; one seed, one run.

Compute nodes crash and begin again. Some are cut off before: they reach neither the catalog nor
`shared` logs, and left the view, but still reach storage nodes and the object store. Storage nodes
stop for a while. Messages take random times; questions and answers are lost or repeated. A request
that was sent takes effect although its sender has crashed.

`shared` logs are those of `indilog.testing`: one order, whose reads see all appends before.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import pytest

from indilog.base.errors import AppendOutcomeUnknownError, IndilogError, NotReadyError
from indilog.base.ids import MAX_SEQNUM, NodeId, SeqNum, UserTag, tag_columns
from indilog.base.log import RESERVED, After, Entry, Log, Record, Session
from indilog.base.log_kinds import LogKind
from indilog.base.retention import Retention
from indilog.config import ClusterConfig, Config, node_config
from indilog.kernel.view import View
from indilog.runtime.cell_store import CellStore
from indilog.testing import MemoryLogs
from indilog.testing.memory_log import MemoryLog
from indilog.wire.cell_messages import CellAnswer, CellQuestion
from indilog_cells import opening, releasing
from indilog_cells.cells import CellsError
from indilog_cells.driver import driver_running
from indilog_cells.releasing import release_log
from indilog_compute.log_kinds import kinds
from indilog_compute.log_kinds.catalog_records import CreatedLog
from indilog_compute.log_kinds.kinds import LogKinds
from indilog_compute.log_kinds.opened_segment import OtherLogs

ENGINES = [NodeId(f"engine-{n}") for n in range(3)]
STORAGE = [NodeId(f"storage-{n}") for n in range(3)]
ANSWER_S = 0.5
"""A question fails after so many seconds."""
_PATIENT_S = 10.0
"""The same after the faults: no message takes so long."""
_ITERATION_S = 1e-6
"""What an iteration of the loop takes at least."""
EPOCH_S = 1e9
"""The time at which the simulated clock begins, seconds since 1970."""

_AnswerT = TypeVar("_AnswerT")


class _Jumping(selectors.SelectSelector):
    """A selector that lets the time of its loop pass instead of waiting."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "no task of the simulation can go on"
        self.loop.now_s += max(timeout, 0.0) + _ITERATION_S
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while nothing else is to be done."""

    def __init__(self) -> None:
        selector = _Jumping()
        super().__init__(selector)
        selector.loop = self
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s


class SwitchWorld:
    """A run of one seed. It must be made within a `VirtualLoop`.

    Args:
        seed: seed.
        patch: replaces the clocks, names and stores that the code would use.
    """

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.loop = asyncio.get_running_loop()
        self.healed = False
        self.loss = self.random.choice([0.0, 0.02, 0.05])
        self.memory = MemoryLogs(clock=self.clock(0.0))
        self.objects: dict[str, bytes] = {}
        self.disks = {node: CellStore(":memory:") for node in STORAGE}
        self.down: set[NodeId] = set()
        self.newest: dict[NodeId, SimulatedNode] = {}
        """The newest incarnation of each compute node."""
        self.absent: set[NodeId] = set()
        """Compute nodes that left the view."""
        self.config = Config(
            cluster=ClusterConfig(storage_nodes=3, replicas=self.random.choice([2, 3])),
            node=node_config(
                object_place="/simulated",
                cell_timeout_s=self.random.choice([0.1, 0.5, 2.0]),
                cell_replace_after_s=1.0,
                append_timeout_s=40.0,
                read_timeout_s=40.0,
                retention_interval_s=0.2,
            ),
        )
        patch.setattr(kinds, "_FOLLOW_S", 2.0)
        patch.setattr(kinds, "_FINISH_S", 3.0)
        for module in (opening, releasing):
            patch.setattr(module, "object_store_at", lambda _place, **_settings: Objects(self))
        patch.setattr(opening, "driver_running", self._driver_running)
        patch.setattr(secrets, "token_hex", lambda n: self.random.randbytes(n).hex())
        patch.setattr(secrets, "randbits", self.random.getrandbits)

    def clock(self, skew_s: float) -> Callable[[], float]:
        """Return a clock that differs from the simulated time."""
        return lambda: EPOCH_S + self.loop.time() + skew_s

    def _driver_running(self, *given: Any, **named: Any) -> Any:  # noqa: ANN401
        clock = self.clock(self.random.uniform(-0.5, 0.5))
        return driver_running(*given, **named, clock=clock)

    @property
    def view(self) -> View:
        """The newest view, of which only the nodes are used."""
        engines = [node for node in ENGINES if node not in self.absent]
        return cast("View", SimpleNamespace(engines=engines, storage_nodes=STORAGE))

    def delay_s(self) -> float:
        """Return how long a message takes: mostly little, sometimes much."""
        long = self.random.random() < 0.05
        return self.random.uniform(0.01, 0.3) if long else self.random.uniform(0.0001, 0.004)

    def lost(self) -> bool:
        """Whether a message is lost."""
        return not self.healed and self.random.random() < self.loss

    async def request(self, apply: Callable[[], _AnswerT], failed: Exception) -> _AnswerT:
        """Send a request that `apply` serves, also if its sender is gone meanwhile.

        Raises:
            Exception: `failed`: the request or its answer was lost; or what `apply` raised.
        """
        answer: asyncio.Future[_AnswerT] = self.loop.create_future()

        def serve() -> None:
            try:
                found = apply()
            except Exception as error:  # noqa: BLE001 - delivered
                self.later(partial(_fail, answer, error))
            else:
                self.later(partial(_resolve, answer, found))

        if not self.lost():
            self.loop.call_later(self.delay_s(), serve)
        timeout_s = _PATIENT_S if self.healed else ANSWER_S
        self.loop.call_later(timeout_s, _fail, answer, failed)
        return await answer

    def later(self, deliver: Callable[[], None]) -> None:
        """Deliver an answer, unless it is lost."""
        if not self.lost():
            self.loop.call_later(self.delay_s(), deliver)

    def kept_of(self, folder: str) -> list[str]:
        """Return the names of objects with a content, and of spaces, of a folder."""
        found = [name for name, content in self.objects.items() if content]
        for node, disk in self.disks.items():
            names = disk._file.execute("SELECT name FROM spaces")
            found += [f"{folder}/{node}" for (name,) in names if name.startswith(f"{folder}@")]
        return [each for each in found if each.startswith(f"{folder}/") and "/LOG" not in each]

    # --- faults of storage nodes

    async def disturb(self) -> None:
        """Stop one storage node at a time, until all is healed."""
        while not self.healed:
            await asyncio.sleep(self.random.uniform(0.1, 3.0))
            node = self.random.choice(STORAGE)
            self.down = {node}
            await asyncio.sleep(self.random.uniform(0.05, 2.0))
            self.down = set()

    def heal(self) -> None:
        """End all faults."""
        self.healed = True
        self.down = set()

    def close(self) -> None:
        """Close the disks."""
        for disk in self.disks.values():
            disk.close()


def _resolve(waiter: asyncio.Future[_AnswerT], found: _AnswerT) -> None:
    if not waiter.done():
        waiter.set_result(found)


def _fail(waiter: asyncio.Future[Any], error: Exception) -> None:
    if not waiter.done():
        waiter.set_exception(error)


class Objects:
    """An object store."""

    def __init__(self, world: SwitchWorld) -> None:
        self._world, self._objects = world, world.objects

    async def _do(self, apply: Callable[[], _AnswerT]) -> _AnswerT:
        return await self._world.request(apply, CellsError("the store does not answer"))

    async def create(self, name: str, content: bytes) -> bool:
        def apply() -> bool:
            is_new = name not in self._objects
            self._objects.setdefault(name, content)
            return is_new

        return await self._do(apply)

    async def replace(self, name: str, content: bytes) -> None:
        await self._do(partial(self._objects.__setitem__, name, content))

    async def get(self, name: str) -> bytes | None:
        return await self._do(partial(self._objects.get, name))

    async def names(self, folder: str) -> list[str]:
        start = f"{folder}/"
        return await self._do(
            lambda: sorted(each[len(start) :] for each in self._objects if each.startswith(start))
        )

    async def full_disks(self) -> Sequence[str]:
        """The store has room."""
        return ()

    async def delete(self, name: str) -> None:
        await self._do(partial(self._objects.pop, name, None))

    async def delete_folder(self, folder: str) -> None:
        for name in [each for each in self._objects if each.startswith(f"{folder}/")]:
            await self.delete(name)


class SharedLog(Log):
    """A `shared` log, over the network."""

    def __init__(self, node: SimulatedNode, name: str, session: Session) -> None:
        self.name = name
        self._node = node
        self._log = MemoryLog(name, logs=node.world.memory, session=session)

    @property
    def scope(self) -> object:
        return self._node.world.memory

    async def _do(
        self, ask: Callable[[], Awaitable[_AnswerT]], *, writes: bool = False
    ) -> _AnswerT:
        node = self._node
        if not node.reaches_shared:
            raise NotReadyError("The node left the platform.")
        failed: IndilogError = NotReadyError("The sequencers do not answer.")
        if writes:
            failed = AppendOutcomeUnknownError("The sequencers do not answer.")
        answer = await node.world.request(partial(_run, ask), failed)
        if not node.reaches_shared:
            raise AppendOutcomeUnknownError("The node left the platform meanwhile.")
        return answer

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        return await self._do(partial(self._log.append, data, tags=tags), writes=True)

    async def append_batch(
        self, entries: Sequence[Entry], *, after: After | None = None
    ) -> list[SeqNum]:
        asked = partial(self._log.append_batch, entries, after=after)
        return await self._do(asked, writes=True)

    async def read(self, seqnum: SeqNum, *, fresh: bool = False) -> Record | None:
        return await self._do(partial(self._log.read, seqnum, fresh=fresh))

    async def read_next(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        wait: float | None = None,
        fresh: bool = False,
    ) -> Record | None:
        page = await self.read_range(tag, bound, limit=1, wait=wait, fresh=fresh)
        return page[0] if page else None

    async def read_prev(
        self, tag: UserTag | None = None, bound: SeqNum = MAX_SEQNUM, *, fresh: bool = False
    ) -> Record | None:
        return await self._do(partial(self._log.read_prev, tag, bound, fresh=fresh))

    async def read_range(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        limit: int = 1000,
        wait: float | None = None,
        fresh: bool = False,
    ) -> list[Record]:
        loop, stream = asyncio.get_running_loop(), self._stream(tag)
        end = loop.time() + (wait or 0.0)
        while True:
            asked = partial(self._log.read_range, tag, bound, limit=limit, fresh=fresh)
            page = await self._do(asked)
            if page or (left_s := end - loop.time()) <= 0.0:
                return page
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, 1.0)):
                    await self._node.world.memory.appended(stream)

    def _stream(self, tag: UserTag | None) -> bytes:
        return tag_columns(self.name, () if tag is None else (tag,)).names

    async def tail(self) -> SeqNum:
        return await self._do(self._log.tail)

    async def now(self) -> float:
        return await self._do(self._log.now)

    async def find_time(self, time: float) -> SeqNum:
        return await self._do(partial(self._log.find_time, time))

    async def trim(self, until: SeqNum, *, tag: UserTag | None = None) -> None:
        await self._do(partial(self._log.trim, until, tag=tag), writes=True)

    async def set_retention(
        self, *, age_s: float | None = None, size_bytes: int | None = None
    ) -> None:
        raise NotImplementedError

    async def retention(self) -> Retention:
        return Retention()

    async def set_aux(self, seqnum: SeqNum, aux: bytes) -> None:
        raise NotImplementedError


def _run(ask: Callable[[], Awaitable[_AnswerT]]) -> _AnswerT:
    """Return what a coroutine that never waits returns."""
    coroutine = cast("Any", ask())
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return cast("_AnswerT", ended.value)
    raise AssertionError("a log in memory waits for nothing")


class SimulatedNode:
    """An incarnation of a compute node."""

    def __init__(self, world: SwitchWorld, name: NodeId) -> None:
        self.world = world
        self.node = name
        world.newest[name] = self
        self.is_alive = True
        self.reaches_shared = True
        self._tasks: set[asyncio.Task[Any]] = set()
        self.kinds = LogKinds(
            self,
            name,
            view=lambda: world.view,
            open_logs=self._open,
            requests=self,
            release=self._release,
            config=world.config,
            has_directory=True,
            serves=lambda: world.view.engines[0] == name,
        )

    async def start(self) -> None:
        """Begin, as soon as the catalog can be read."""
        while True:
            try:
                await self.kinds.start()
            except IndilogError:
                await asyncio.sleep(0.05)
            else:
                return

    def spawn(self, work: Any) -> asyncio.Task[Any]:  # noqa: ANN401 - a coroutine
        """Run a coroutine until it ends, or the node crashes."""
        task = self.world.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def crash(self) -> None:
        """End at once; what was sent may still arrive."""
        self.is_alive = self.reaches_shared = False
        await self.cancel()
        await self.kinds.stop()

    async def cancel(self) -> None:
        """Cancel what runs on the node for callers."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- what the node offers to `LogKinds` and to callers

    def log(self, name: str, session: Session | None = None) -> Log:
        session = session or Session()
        moved = None if name.startswith(RESERVED) else self.kinds.log(name, session)
        return moved or self.shared(name, session)

    def shared(self, name: str, session: Session) -> Log:
        return SharedLog(self, name, session)

    def wake_readers(self) -> None:
        return None

    def _open(self, created: CreatedLog, *, is_new: bool) -> AbstractAsyncContextManager[OtherLogs]:
        return self._opened(created, is_new=is_new)

    @asynccontextmanager
    async def _opened(self, created: CreatedLog, *, is_new: bool) -> AsyncIterator[OtherLogs]:
        config = self.world.config
        async with opening.created_logs(
            created, self.kinds, config, None, is_new=is_new, is_shared=True
        ) as logs:
            yield logs

    async def _release(self, created: CreatedLog) -> None:
        await release_log(created, self.kinds, self.world.config, None, is_shared=True)

    async def ask_cells(self, node: NodeId, question: CellQuestion) -> CellAnswer:
        world = self.world
        failed = NotReadyError(f"{node} does not answer.")
        if not self.is_alive:
            raise failed

        def serve() -> CellAnswer:
            if node in world.down:
                raise failed
            (answer,) = world.disks[node].serve([question])
            if world.random.random() < world.loss:  # it arrives twice
                world.disks[node].serve([question])
            return answer

        return await world.request(serve, failed)

    async def growth_of(self, nodes: Sequence[NodeId], folder: str, position: int) -> bool:
        """No node tells another one that a log has grown: readers look for new cells."""
        del nodes, folder, position
        await asyncio.sleep(1.0)
        return False

    def grew(self, folder: str, position: int) -> None:
        """See `growth_of`."""

    def full_disks(self) -> Collection[NodeId]:
        """All disks have room."""
        return ()

    async def append_through(self, node: NodeId, folder: str, owner: str, content: bytes) -> bytes:
        """Let another node append; see `OwnerAppends`, of which this has the guarantees."""
        world = self.world
        failed = NotReadyError(f"{node} does not answer.")
        if not self.is_alive:
            raise failed
        answer: asyncio.Future[bytes] = world.loop.create_future()

        async def serve(peer: SimulatedNode) -> None:
            try:
                found = await peer.kinds.append_content(folder, owner, content)
            except IndilogError as error:
                world.later(partial(_fail, answer, error))
            else:
                world.later(partial(_resolve, answer, found))

        def arrive() -> None:
            peer = world.newest[node]
            if peer.is_alive and world.newest[self.node] is self:
                peer.spawn(serve(peer))

        if not world.lost():
            world.loop.call_later(world.delay_s(), arrive)
        timeout_s = _PATIENT_S if world.healed else world.config.node.cells.cell_timeout_s
        world.loop.call_later(timeout_s, _fail, answer, failed)
        return await answer


def kinds_of_seed(seed: int) -> list[LogKind]:
    """Return the kind with which a log is created, and those after its switches."""
    choose = random.Random(f"kinds of {seed}")
    every: tuple[LogKind, ...] = ("shared", "object-store", "order-first", "owned")
    found = [choose.choice(every[1:])]
    for _ in range(3):
        found.append(choose.choice([kind for kind in every if kind != found[-1]]))
    return found
