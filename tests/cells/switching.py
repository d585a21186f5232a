"""A log of a real platform that is switched between kinds while it is used, and its checker.

The calls and pauses follow a seed. The platform's clocks, disks and sockets are real, so a seed
does not replay a run; it only makes runs differ.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from indilog.base.errors import AppendOutcomeUnknownError, ConditionFailedError
from indilog.base.ids import MAX_SEQNUM
from indilog.base.log import After, Entry, Log
from indilog.base.log_kinds import LOG_KINDS, SHARED, LogKind
from indilog.config import MIB, ClusterConfig, Config, node_config
from indilog.runtime.cluster.assembly import Platform, embedded
from indilog_compute.local_log import LocalLog, LocalLogs
from indilog_compute.log_kinds.catalog import ReplayedCatalog
from indilog_compute.log_kinds.kinds import LogKinds

TAG, CHAIN = "t", "chain"
_APPENDS_MAX = 60


@asynccontextmanager
async def platform_with(directory: Path, *, engines: int = 3) -> AsyncIterator[Platform]:
    """Yield a platform with chains of two storage nodes."""
    node = node_config(
        data_dir=directory,
        segment_bytes=8 * MIB,
        object_logs_max=1000,
        order_first_logs_max=1000,
        owned_logs_max=1000,
    )
    cluster = ClusterConfig(engines=engines, storage_nodes=2, replicas=2)
    async with embedded(Config(cluster=cluster, node=node)) as platform:
        yield platform


def kinds_from(seed: int, count: int) -> list[LogKind]:
    """Return the kinds of a log after its switches. Within 9 seeds, each kind follows each other
    one.
    """
    kinds: list[LogKind] = [SHARED]
    for number in range(count):
        others = [kind for kind in LOG_KINDS if kind != kinds[-1]]
        kinds.append(others[(seed // 3**number) % len(others)])
    return kinds[1:]


def kinds_of(logs: LocalLogs) -> LogKinds:
    assert logs.kinds is not None
    return logs.kinds


def slowed(monkeypatch: pytest.MonkeyPatch, pause_s: Callable[[], float]) -> None:
    """Let steps of switches take a while, and appends between the caller and the shard, so that
    each may overtake the other.
    """

    def slow(owner: type, name: str) -> None:
        step = getattr(owner, name)

        async def after_a_pause(*given: Any, **named: Any) -> Any:  # noqa: ANN401
            if (pause := pause_s()) > 0.0:
                await asyncio.sleep(pause)
            return await step(*given, **named)

        monkeypatch.setattr(owner, name, after_a_pause)

    for name in ("announce", "seal", "bridge"):
        slow(ReplayedCatalog, name)
    for name in ("append", "append_batch"):
        slow(LocalLog, name)


@dataclass
class Append:
    """An append: what was written, when (in steps of the history), and what became of it.

    Attributes:
        began, ended: steps of the history; `ended` is None if the outcome is unknown.
        seqnums: None: it failed, or its outcome is unknown.
        known: seqnum in its condition; None: it had none.
    """

    data: list[bytes]
    began: int
    ended: int | None = None
    seqnums: list[int] | None = None
    known: int | None = None
    is_unknown: bool = False


@dataclass
class Read:
    """A read: from `bound` on, or (`is_prev`) back from it."""

    bound: int
    is_prev: bool
    began: int
    must_see: int
    """Seqnum of the newest record that the read must see."""
    found: int | None = None
    floor: int | None = None
    """The floor in the error of a read that was refused, because records were trimmed."""
    ended: int | None = None


@dataclass
class Trim:
    """A trim below `until`: when it began, and when it ended (steps of the history)."""

    until: int
    began: int
    ended: int | None = None


@dataclass
class History:
    """What the callers of one log did and saw."""

    appends: list[Append] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    followed: list[list[tuple[int, bytes]]] = field(default_factory=list)
    tails: list[tuple[int, int]] = field(default_factory=list)
    """Seqnums that a `tail` had to be above, and what it was."""
    times: list[tuple[float, int, int]] = field(default_factory=list)
    """What `now` returned, and the steps at which the call began and ended."""
    trims: list[Trim] = field(default_factory=list)
    final: list[tuple[int, bytes, float, tuple[int | str, ...]]] = field(default_factory=list)
    """All records; those that were trimmed were read before."""
    left: list[str] = field(default_factory=list)
    """What is kept of freed segments."""
    kinds: list[str] = field(default_factory=list)
    steps: int = 0

    def step(self) -> int:
        self.steps += 1
        return self.steps

    def newest(self) -> int:
        """Return the greatest acknowledged seqnum; -1: there is none."""
        return max((a.seqnums[-1] for a in self.appends if a.seqnums), default=-1)


class Switching:
    """Callers of one log on all compute nodes, and its switches.

    Args:
        seed: seed.
        platform: the platform.
        kinds: the kinds of the log after its switches; None: they follow the seed.
        patience_s: how long subscriptions may take to see the last record.
    """

    def __init__(
        self,
        seed: int,
        platform: Platform,
        *,
        kinds: Sequence[LogKind] | None = None,
        patience_s: float = 60.0,
    ) -> None:
        self.random = random.Random(seed)
        self.kinds = kinds_from(seed, 3) if kinds is None else kinds
        self.nodes = list(platform.engines.values())
        self.name = f"log-{seed}"
        self._patience_s = patience_s
        self.history = History()
        self._stopped = False

    async def run(self) -> History:
        """Run it; return what happened."""
        writers = [
            asyncio.create_task(self._write(number, node.log(self.name)))
            for number, node in enumerate(self.nodes)
        ]
        readers = [asyncio.create_task(self._look(node.log(self.name))) for node in self.nodes]
        followers = [asyncio.create_task(self._follow(node.log(self.name))) for node in self.nodes]
        try:
            for kind in self.kinds:
                await asyncio.sleep(self.random.uniform(0.0, 0.03))
                info = await kinds_of(self.random.choice(self.nodes)).switch(self.name, kind)
                self.history.kinds.append(info.kind)
            await asyncio.sleep(self.random.uniform(0.0, 0.03))
        finally:
            self._stopped = True
            ended = await asyncio.gather(*writers, *readers, return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                raise error
        await self._finish(followers)
        return self.history

    async def _finish(self, followers: Sequence[asyncio.Task[None]]) -> None:
        log, history, bound = self.nodes[0].log(self.name), self.history, 0
        while page := await log.read_range(bound=bound, fresh=True):
            history.final += [(r.seqnum, r.data, r.ordered_at, r.tags) for r in page]
            bound = page[-1].seqnum + 1
        lines = sum(TAG in tags for *_, tags in history.final)
        async with asyncio.timeout(self._patience_s):
            while any(len(each) < lines for each in history.followed):
                if any(task.done() for task in followers):
                    break
                await asyncio.sleep(0.005)
        for task in followers:
            task.cancel()
        for error in await asyncio.gather(*followers, return_exceptions=True):
            if isinstance(error, Exception):
                raise error

    async def _write(self, writer: int, log: Log) -> None:
        number = 0
        while not self._stopped and number < _APPENDS_MAX:
            number += 1
            data = b"%d-%d" % (writer, number)
            append = Append([data], self.history.step())
            self.history.appends.append(append)
            what = self.random.random()
            try:
                if what < 0.6:
                    append.seqnums = [await log.append(data, tags=[TAG])]
                elif what < 0.75:
                    append.data = [data + b"a", data + b"b"]
                    append.seqnums = await log.append_batch(
                        [Entry(each, (TAG,)) for each in append.data]
                    )
                else:
                    await self._append_if(log, append)
            except AppendOutcomeUnknownError:
                append.is_unknown = True
            except ConditionFailedError:
                pass
            else:
                append.ended = self.history.step()
                await self._look_at_own(log, append)
            await asyncio.sleep(self.random.choice([0.0, 0.0, 0.002]))

    async def _append_if(self, log: Log, append: Append) -> None:
        last = await log.read_prev(CHAIN)
        append.known = -1 if last is None else last.seqnum
        after = After(CHAIN, None if last is None else last.seqnum)
        append.seqnums = await log.append_batch(
            [Entry(each, (CHAIN,)) for each in append.data], after=after
        )

    async def _look_at_own(self, log: Log, append: Append) -> None:
        assert append.seqnums is not None
        must_see = append.seqnums[-1]
        read = Read(MAX_SEQNUM, is_prev=True, began=self.history.step(), must_see=must_see)
        found = await log.read_prev()
        read.found = None if found is None else found.seqnum
        self.history.reads.append(read)

    async def _look(self, log: Log) -> None:
        history = self.history
        while not self._stopped:
            newest = history.newest()
            what = self.random.randrange(4)
            if what == 0:
                history.tails.append((newest, await log.tail()))
            elif what == 1:
                began = history.step()
                now = await log.now()
                history.times.append((now, began, history.step()))
            else:
                is_fresh = self.random.random() < 0.5
                bound = self.random.randint(0, newest + 1)
                read = Read(bound, what == 3, history.step(), newest if is_fresh else -1)
                asked = log.read_prev if what == 3 else log.read_next
                found = await asked(None, bound, fresh=is_fresh)
                read.found = None if found is None else found.seqnum
                history.reads.append(read)
            await asyncio.sleep(0.001)

    async def _follow(self, log: Log) -> None:
        lines: list[tuple[int, bytes]] = []
        self.history.followed.append(lines)
        async for record in log.subscribe(TAG):
            lines.append((record.seqnum, record.data))  # noqa: PERF401 - seen while it grows


def check(history: History) -> list[str]:
    """Return what is wrong with a history, by the records of the log at the end."""
    seqnums = [line[0] for line in history.final]
    places = {line[1]: line[0] for line in history.final}
    found = [
        f"seqnum {two} follows {one}" for one, two in itertools.pairwise(seqnums) if two <= one
    ]
    found += [
        f"{data!r} is in the log {count} times"
        for data, count in Counter(line[1] for line in history.final).items()
        if count > 1
    ]
    found += [
        f"the time of {two[0]} is before that of {one[0]}"
        for one, two in zip(history.final, history.final[1:], strict=False)
        if two[2] < one[2]
    ]
    found += _append_faults(history, places)
    found += _order_faults(history)
    found += _chain_faults(history)
    found += [fault for read in history.reads for fault in _read_faults(read, seqnums)]
    found += [f"the tail was {t}, but {above} existed" for above, t in history.tails if t <= above]
    found += _time_faults(history)
    found += [f"{left} was not deleted" for left in history.left]
    found += [fault for read in history.reads for fault in _trim_faults(read, history.trims)]
    wanted = [(seqnum, data) for seqnum, data, _, tags in history.final if TAG in tags]
    found += [
        f"a subscription saw {lines[-3:]} of {len(lines)} instead of {wanted[-3:]} of {len(wanted)}"
        for lines in history.followed
        if lines != wanted
    ]
    return found


def _append_faults(history: History, places: dict[bytes, int]) -> list[str]:
    found = []
    for append in history.appends:
        there = [places.get(data) for data in append.data]
        if append.seqnums is not None:
            if there != append.seqnums:
                found.append(f"{append.data} was acknowledged at {append.seqnums}, is at {there}")
        elif not append.is_unknown and any(each is not None for each in there):
            found.append(f"{append.data} failed, but is at {there}")
        elif len({each is None for each in there}) > 1:
            found.append(f"{append.data} is in the log in part")
    return found


def _order_faults(history: History) -> list[str]:
    """Find appends that were ordered against real time."""
    done = [append for append in history.appends if append.seqnums]
    events = sorted(
        [(append.began, 0, append) for append in done]
        + [(append.ended or 0, 1, append) for append in done],
        key=lambda event: event[:2],
    )
    found, newest = [], -1
    for _, is_end, append in events:
        assert append.seqnums is not None
        if is_end:
            newest = max(newest, append.seqnums[-1])
        elif append.seqnums[0] <= _ended_before(done, append):
            found.append(f"{append.data} is ordered before a record that was complete")
    return found


def _ended_before(done: Sequence[Append], append: Append) -> int:
    return max(
        (a.seqnums[-1] for a in done if a.seqnums and (a.ended or 0) < append.began), default=-1
    )


def _chain_faults(history: History) -> list[str]:
    chain = [seqnum for seqnum, _, _, tags in history.final if CHAIN in tags]
    return [
        f"{append.data} at {append.seqnums} knew {append.known}, but the chain is {chain}"
        for append in history.appends
        if append.known is not None
        and append.seqnums
        and any(append.known < each < append.seqnums[0] for each in chain)
    ]


def _read_faults(read: Read, seqnums: Sequence[int]) -> list[str]:
    if read.found is not None and read.found not in seqnums:
        return [f"a read found {read.found}, which is no record"]
    floor = read.floor or 0
    if read.is_prev:
        least = max(
            (s for s in seqnums if floor <= s <= min(read.bound, read.must_see)), default=None
        )
        is_stale = least is not None and (read.found is None or read.found < least)
        if is_stale:
            return [f"a read up to {read.bound} found {read.found}, not {least}"]
        return []
    if read.found is None:
        missed = [s for s in seqnums if read.bound <= s <= read.must_see]
        if read.floor is not None:
            return (
                [] if read.bound < floor else [f"a read from {read.bound} found the floor {floor}"]
            )
        return [f"a read from {read.bound} found nothing, not {missed[0]}"] if missed else []
    missed = [s for s in seqnums if read.bound <= s < read.found]
    return [f"a read from {read.bound} found {read.found}, not {missed[0]}"] if missed else []


def _trim_faults(read: Read, trims: Sequence[Trim]) -> list[str]:
    """Find a read of what is trimmed, or a floor that no trim has set."""
    before = max((t.until for t in trims if t.ended and t.ended < read.began), default=0)
    least = read.found if read.is_prev else read.bound
    if read.found is not None and least is not None and least < before:
        return [f"a read from {read.bound} found {read.found}, but the floor was {before}"]
    begun = max((t.until for t in trims if t.began < (read.ended or 0)), default=0)
    if read.floor is not None and read.floor > begun:
        return [f"a read found the floor {read.floor}, but no trim was above {begun}"]
    return []


def _time_faults(history: History) -> list[str]:
    ordered = {line[0]: line[2] for line in history.final}
    found = []
    for now, began, ended in history.times:
        for append in history.appends:
            if not append.seqnums:
                continue
            at = ordered.get(append.seqnums[0])
            if at is None:
                continue
            if (append.ended or 0) < began and at > now:
                found.append(f"{append.data} was ordered at {at}, but later it was {now}")
            if append.began > ended and at < now:
                found.append(f"{append.data} was ordered at {at}, but before it was {now}")
    return found
