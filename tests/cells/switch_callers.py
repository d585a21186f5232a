"""Callers, switches and crashes of one log in a simulated platform (`tests.cells.switch_world`).

What they did and saw is a `History` of `tests.cells.switching`, whose checker judges it.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import pytest

from indilog.base.errors import (
    AppendOutcomeUnknownError,
    ConditionFailedError,
    IndilogError,
    TrimmedError,
)
from indilog.base.ids import MAX_SEQNUM, NodeId
from indilog.base.log import After, Entry, Log
from indilog.base.log_kinds import STRIPES_MAX, LogKind
from tests.cells.switch_world import ENGINES, SimulatedNode, SwitchWorld, VirtualLoop, kinds_of_seed
from tests.cells.switching import CHAIN, TAG, Append, History, Read, Trim

NAME = "log"
_APPENDS_MAX = 25
"""Appends of each node."""
_CRASHES_MAX = 6
_END_S = 600.0
"""Simulated seconds in which everything ends."""


class Callers:
    """Callers on all compute nodes of a world."""

    def __init__(self, seed: int, world: SwitchWorld) -> None:
        self.world = world
        self.random = world.random
        self.history = History()
        self.created, *kinds = kinds_of_seed(seed)
        self.switches: list[tuple[LogKind, int | None]] = []
        """Kinds and stripes."""
        for kind in kinds:
            self.switches.append((kind, None))
            if seed % 3 == 2 and kind in STRIPES_MAX:
                self.switches.append((kind, 1 + seed % 5))
        self.crashes = 0
        self._nodes: dict[NodeId, SimulatedNode] = {}
        self._numbers = dict.fromkeys(ENGINES, 0)
        self._lines: dict[NodeId, list[tuple[int, bytes]]] = {node: [] for node in ENGINES}
        self._is_over = False
        self._kept = 0
        """All records below this seqnum are in the history."""

    async def run(self) -> None:
        """Run until all switches are done, then without faults until all callers have ended."""
        world = self.world
        async with asyncio.timeout(_END_S):
            for name in ENGINES:
                self._nodes[name] = SimulatedNode(world, name)
            await asyncio.gather(*(node.start() for node in self._nodes.values()))
            await self._create()
            works = world.disturb(), self._crash(), self._trim()
            disturbing = [asyncio.create_task(work) for work in works]
            for node in self._nodes.values():
                self._begin(node)
            for kind, stripes in self.switches:
                await asyncio.sleep(self.random.uniform(0.0, 0.4))
                await self._switch(kind, stripes)
            await asyncio.sleep(self.random.choice([0.0, 0.3, 2.0]))
            self._is_over = True
            world.heal()
            await asyncio.gather(*disturbing)
            await self._finish()
            for node in self._nodes.values():
                await node.crash()

    def _pick(self) -> SimulatedNode:
        present = [name for name in ENGINES if name not in self.world.absent]
        return self._nodes[self.random.choice(present)]

    async def _create(self) -> None:
        while True:
            try:
                await self._nodes[ENGINES[0]].kinds.create(NAME, self.created)
            except IndilogError:
                await asyncio.sleep(0.05)
            else:
                return

    async def _switch(self, kind: LogKind, stripes: int | None) -> None:
        """Switch the log; after a failure or a crash, another node tries it."""
        while True:
            node = self._pick()
            switching = node.spawn(node.kinds.switch(NAME, kind, stripes=stripes))
            await asyncio.wait([switching])
            if not switching.cancelled() and switching.exception() is None:
                info = switching.result()
                assert stripes in (None, info.stripes)
                self.history.kinds.append(info.kind)
                return
            if not switching.cancelled():
                error = switching.exception()
                assert isinstance(error, IndilogError), repr(error)
            await asyncio.sleep(0.1)

    async def _crash(self) -> None:
        """Let one node at a time crash and begin again, some times. It may have left the view
        before, and not know it.
        """
        for _ in range(self.random.randrange(_CRASHES_MAX + 1)):
            await asyncio.sleep(self.random.uniform(0.1, 1.5))
            if self._is_over:
                return
            name = self.random.choice(ENGINES)
            node = self._nodes[name]
            if self.random.random() < 0.5:  # it left the view before, and does not know it yet
                node.reaches_shared = False
                self.world.absent.add(name)
                if self.random.random() < 0.7:  # its callers are idle until much has happened
                    await node.cancel()
                    await asyncio.sleep(self.random.uniform(0.5, 6.0))
                    self._begin(node)
                await asyncio.sleep(self.random.uniform(0.1, 2.0))
            await node.crash()
            self.crashes += 1
            await asyncio.sleep(self.random.uniform(0.01, 0.5))
            self._nodes[name] = again = SimulatedNode(self.world, name)
            self.world.absent.discard(name)
            await again.start()
            self._begin(again)

    def _begin(self, node: SimulatedNode) -> None:
        log = node.log(NAME)
        for work in (self._write(node, log), self._look(log), self._follow(node, log)):
            node.spawn(work)

    async def _finish(self) -> None:
        """Wait for all callers, and read the log."""
        history = self.history
        await self._until(lambda: all(n >= _APPENDS_MAX for n in self._numbers.values()))
        await asyncio.sleep(1.0)  # for the last appends
        await self._keep(self._nodes[ENGINES[0]].log(NAME), MAX_SEQNUM)
        lines = sum(TAG in tags for *_, tags in history.final)
        await self._until(lambda: all(len(each) >= lines for each in self._lines.values()))
        history.followed = list(self._lines.values())
        await self._free()

    async def _free(self) -> None:
        """Trim the log, and wait until nothing is kept of its closed segments."""
        node = self._nodes[ENGINES[0]]
        state = node.kinds._catalog.logs[NAME]
        freed = [each.folder for each in (*state.segments[:-1], *state.unreleased) if each.folder]
        tail = await node.log(NAME).tail()
        self.history.trims.append(Trim(tail, self.history.step()))
        await node.log(NAME).trim(tail)
        await self._until(lambda: len(state.segments) == 1 and not state.unreleased)
        self.history.left = [left for folder in freed for left in self.world.kept_of(folder)]

    async def _trim(self) -> None:
        """Trim what the subscriptions of all nodes in the view have seen, after reading it into the
        history.
        """
        history = self.history
        while not self._is_over:
            await asyncio.sleep(self.random.uniform(0.1, 0.5))
            present = [name for name in ENGINES if name not in self.world.absent]
            seen = (self._lines[name][-1:] for name in present)
            until = min(lines[0][0] + 1 if lines else 0 for lines in seen)
            if until > max((trim.until for trim in history.trims), default=0):
                node = self._pick()
                await asyncio.wait([node.spawn(self._trim_below(node.log(NAME), until))])

    async def _trim_below(self, log: Log, until: int) -> None:
        try:
            await self._keep(log, until)
            self.history.trims.append(trim := Trim(until, self.history.step()))
            await log.trim(until)
            trim.ended = self.history.step()
        except IndilogError:
            pass  # the next trim is further

    async def _keep(self, log: Log, until: int) -> None:
        """Read the records below `until` into the history."""
        while page := await log.read_range(bound=self._kept, fresh=True):
            kept = [record for record in page if record.seqnum < until]
            self.history.final += [(r.seqnum, r.data, r.ordered_at, r.tags) for r in kept]
            self._kept = max(self._kept, page[len(kept) - 1].seqnum + 1 if kept else 0)
            if len(kept) < len(page):
                return

    @staticmethod
    async def _until(holds: Callable[[], bool]) -> None:
        """Wait until a condition holds, in simulated time."""
        while True:
            if holds():
                return
            await asyncio.sleep(0.05)

    async def _write(self, node: SimulatedNode, log: Log) -> None:
        name, history = node.node, self.history
        while self._numbers[name] < _APPENDS_MAX:
            if not self._is_over and self._numbers[name] >= _APPENDS_MAX - 3:
                await asyncio.sleep(0.05)  # some are left for the time after the last switch
                continue
            self._numbers[name] += 1
            data = f"{name}/{self._numbers[name]}".encode()
            append = Append([data], history.step(), is_unknown=True)  # it may crash
            history.appends.append(append)
            try:
                await self._append(log, append)
            except AppendOutcomeUnknownError:
                pass
            except ConditionFailedError:
                append.is_unknown = False
            except IndilogError:
                append.is_unknown = False
                await asyncio.sleep(0.05)
            else:
                append.is_unknown = False
                append.ended = history.step()
            await asyncio.sleep(self.random.choice([0.0, 0.01, 0.05]))

    async def _append(self, log: Log, append: Append) -> None:
        what, (data,) = self.random.random(), append.data
        if what < 0.6:
            append.seqnums = [await log.append(data, tags=[TAG])]
        elif what < 0.75:
            append.data = [data + b"a", data + b"b"]
            entries = [Entry(each, (TAG,)) for each in append.data]
            append.seqnums = await log.append_batch(entries)
        else:
            last = await log.read_prev(CHAIN)
            append.known = -1 if last is None else last.seqnum
            after = After(CHAIN, None if last is None else last.seqnum)
            append.seqnums = await log.append_batch([Entry(data, (CHAIN,))], after=after)

    async def _look(self, log: Log) -> None:
        while not self._is_over:
            try:
                await self._look_once(log)
            except IndilogError:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.01)

    async def _look_once(self, log: Log) -> None:
        history, what = self.history, self.random.randrange(5)
        newest = history.newest()
        if what == 0:
            history.tails.append((newest, await log.tail()))
        elif what == 1:
            began = history.step()
            now = await log.now()
            history.times.append((now, began, history.step()))
        else:
            is_fresh = self.random.random() < 0.7
            bound = self.random.choice([self.random.randint(0, newest + 1), MAX_SEQNUM])
            is_prev = bound == MAX_SEQNUM or what == 2
            read = Read(bound, is_prev, history.step(), newest if is_fresh else -1)
            asked = log.read_prev if is_prev else log.read_next
            try:
                found = await asked(None, bound, fresh=is_fresh)
                read.found = None if found is None else found.seqnum
            except TrimmedError as error:
                read.floor = error.first_seqnum
            read.ended = history.step()
            history.reads.append(read)

    async def _follow(self, node: SimulatedNode, log: Log) -> None:
        lines = self._lines[node.node]
        bound = 0
        while True:
            bound = max(bound, lines[-1][0] + 1 if lines else 0)
            try:
                async for record in log.subscribe(TAG, bound):
                    lines.append((record.seqnum, record.data))
            except TrimmedError as error:
                seen, floor = lines[-1][0] if lines else -1, error.first_seqnum
                kept = (line for line in self.history.final if seen < line[0] < floor)
                lines += [(seqnum, data) for seqnum, data, _, tags in kept if TAG in tags]
                bound = floor
            except IndilogError:
                await asyncio.sleep(0.05)


def simulated(seed: int) -> Callers:
    """Run a seed; return what happened.

    The garbage collector is off, because it closes abandoned generators, with steps of the event
    loop, at a time that depends on the tests before.

    Raises:
        AssertionError, TimeoutError: something does not end.
    """
    gc.disable()
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            asyncio.Runner(loop_factory=VirtualLoop) as runner,
        ):
            return runner.run(_run(seed, patch))
    finally:
        gc.enable()


async def _run(seed: int, patch: pytest.MonkeyPatch) -> Callers:
    world = SwitchWorld(seed, patch)
    callers = Callers(seed, world)
    try:
        await callers.run()
    finally:
        world.close()
    return callers
