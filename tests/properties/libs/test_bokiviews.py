"""Views in any interleaving of their processes, against a sequential model of the log.

Processes with two callers each change objects of all kinds, one command or transaction after the
other. The stepper decides which caller makes the next call of the log. Processes crash within
calls, appends appear late, sessions lag behind trims, and checkpoints are frequent. Every outcome
that a caller got, and every linearizable read, must be that of the model. The model replays the
records that the test kept, also trimmed ones. It knows what each transaction read, and not the
places in records.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, TypeAlias
from unittest import mock

import msgspec
import pytest

from bokiviews import ConflictError, Views, replica
from bokiviews.counters import AddTo
from bokiviews.lists import ClearList, Extend, ListCommand, PopItem, SetItem
from bokiviews.maps import ClearMap, MapCommand, Put, Remove, Replace
from bokiviews.places import RecentWrites
from bokiviews.records import Change, Command, decode_changes
from bokiviews.replica import ViewsReplica
from bokiviews.sets import Add, ClearSet, DiscardMembers, SetCommand
from bokiviews.state import ChangeOutcome, Committed, Conflicted, ViewsState
from bokiviews.transaction import Transaction
from bokiviews.values import ValueType
from indilog.base.errors import AppendOutcomeUnknownError
from indilog.base.ids import SeqNum, UserTag
from indilog.base.log import After, Entry, Log, Record
from indilog.testing.stepper import SteppedLog, run_stepped
from tests.support.elapsing_log import Kept, Time

PROCESSES = 3
CALLERS = 2
STEPS = 10
SEEDS = 120
PLANTED_SEEDS = 120
NAMES = ("m", "l", "c", "s")
KEYS = ("a", "b", 3)
WHOLE = object()
Read: TypeAlias = tuple[str, object]
"""An object, and a key or `WHOLE`."""
Reads: TypeAlias = tuple[SeqNum, Sequence[Read]]
"""The horizon of a transaction, and what it read."""
VALUES: ValueType[Any] = ValueType(Any)
_DECODERS = {
    name: msgspec.msgpack.Decoder(type_)
    for name, type_ in {"m": MapCommand, "l": ListCommand, "c": AddTo, "s": SetCommand}.items()
}


class Crash(BaseException):
    """The process has ended."""


class Unreliable(SteppedLog):
    """The log of one incarnation of a process, whose session lags until it reads fresh.

    Attributes:
        is_dead: whether the process has crashed.
    """

    def __init__(self, log: Log, rng: random.Random, late: list[Sequence[Entry]]) -> None:
        super().__init__(log)
        self.is_dead = False
        self._rng = rng
        self._late = late
        self._seen: SeqNum = 0

    def _maybe_crash(self, rate: float) -> None:
        self.is_dead = self.is_dead or self._rng.random() < rate
        if self.is_dead:
            raise Crash

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        return (await self.append_batch([Entry(data, tuple(tags))]))[0]

    async def append_batch(
        self, entries: Sequence[Entry], *, after: After | None = None
    ) -> list[SeqNum]:
        self._maybe_crash(0.01)
        fate = self._rng.random()
        if fate < 0.03:
            raise AppendOutcomeUnknownError
        if fate < 0.06:
            self._late.append(entries)
            raise AppendOutcomeUnknownError
        seqnums = await super().append_batch(entries, after=after)
        self._maybe_crash(0.01)
        if fate < 0.09:
            raise AppendOutcomeUnknownError
        self._seen = max(self._seen, seqnums[-1] + 1)
        return seqnums

    async def read_range(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        limit: int = 1000,
        wait: float | None = None,
        fresh: bool = False,
    ) -> list[Record]:
        self._maybe_crash(0.005)
        page = await super().read_range(tag, bound, limit=limit, wait=wait)
        if fresh or self._rng.random() < 0.3:
            self._seen = max(self._seen, await self._log.tail())
        self._maybe_crash(0.0)
        return [record for record in page if record.seqnum < self._seen]

    async def tail(self) -> SeqNum:
        self._maybe_crash(0.0)
        self._seen = await super().tail()
        return self._seen


class Model:
    """A plain replay.

    Attributes:
        outcomes: of each change, by its bytes.
        states: by seqnum, the value of each readable thing after the records below it.
    """

    def __init__(self, reads: dict[bytes, Reads]) -> None:
        self.outcomes: dict[bytes, ChangeOutcome] = {}
        self.states: list[tuple[SeqNum, dict[Read, object]]] = [(0, self._readable({}))]
        self._reads = reads
        self._writes: list[tuple[SeqNum, str, object]] = []
        self._map: dict[object, bytes] = {}
        self._list: list[bytes] = []
        self._set: set[object] = set()
        self._count = 0

    def replay(self, records: Sequence[Record]) -> None:
        for record in records:
            if "views:views:changes" not in record.tags:
                continue
            listed = decode_changes(record.data)
            assert listed is not None
            for change in listed.changes:
                self.outcomes[bytes_of(change)] = self._outcome(record.seqnum, change)
            self.states.append((record.seqnum + 1, self._readable(self._map)))

    def _readable(self, entries: dict[object, bytes]) -> dict[Read, object]:
        found: dict[Read, object] = {
            ("m", key): VALUES.decode(entries[key]) if key in entries else None for key in KEYS
        }
        found["c", WHOLE] = getattr(self, "_count", 0)
        return found

    def _outcome(self, seqnum: SeqNum, change: Change) -> ChangeOutcome:
        horizon, reads = self._reads.get(msgspec.msgpack.encode(change.commands), (0, ()))
        for read in reads:
            for written, name, key in self._writes:
                if written >= horizon and name == read[0] and meet(key, read[1]):
                    return Conflicted()
        return Committed(tuple([self._result(seqnum, command) for command in change.commands]))

    def _result(self, seqnum: SeqNum, command: Command) -> object:
        decoded = _DECODERS[command.name].decode(command.content)
        keys: list[object]
        match decoded:
            case Put(pairs):
                keys = [key for key, _ in pairs]
            case Add(members) | DiscardMembers(members):
                keys = list(members)
            case Replace(key=key) | Remove(key=key):
                keys = [key]
            case _:
                keys = [WHOLE]
        self._writes += [(seqnum, command.name, key) for key in keys]
        results: dict[str, Callable[[Any], object]] = {
            "m": self._map_result, "l": self._list_result,
            "c": self._count_result, "s": self._set_result,
        }  # fmt: skip
        return results[command.name](decoded)

    def _map_result(self, command: MapCommand) -> object:
        match command:
            case Put(pairs, is_new):
                old = self._map.get(pairs[0][0])
                if old is None or not is_new:
                    self._map |= dict(pairs)
                return old
            case Replace(key, expected, value):
                is_equal = self._map.get(key) == expected
                self._map |= {key: value} if is_equal else {}
                return is_equal
            case Remove(key):
                return self._map.pop(key, None)
            case ClearMap():
                self._map = {}
                return None

    def _set_result(self, command: SetCommand) -> object:
        before = set(self._set)
        match command:
            case Add(members):
                self._set |= set(members)
            case DiscardMembers(members):
                self._set -= set(members)
            case ClearSet():
                self._set = set()
        return len(before ^ self._set)

    def _count_result(self, command: AddTo) -> object:
        if command.at_least is not None and self._count + command.by < command.at_least:
            return None
        self._count += command.by
        return self._count

    def _list_result(self, command: ListCommand) -> object:
        old: object = None
        with suppress(IndexError):
            match command:
                case Extend(values):
                    self._list += values
                    old = len(self._list)
                case SetItem(index, value):
                    old, self._list[index] = self._list[index], value
                case PopItem(index):
                    old = self._list.pop(index)
                case ClearList():
                    self._list = []
        return old

    def check_state(self, state: ViewsState) -> None:
        """Assert that a replica that has read everything equals the model."""
        for name, mine in (
            ("m", [*self._map.items()]), ("l", self._list), ("c", str(self._count)), ("s", None),
        ):  # fmt: skip
            machine = state.machine(name)
            if machine is None:
                assert not mine or mine == "0", f"no process has {name}"
            elif name == "s":
                assert set(machine.snapshot()) == self._set  # type: ignore[call-overload]
            elif name == "m":
                assert dict(machine.snapshot()) == self._map  # type: ignore[call-overload]
            else:
                assert machine.snapshot() == mine
        state.check_invariants()


def meet(one: object, other: object) -> bool:
    return one is WHOLE or other is WHOLE or one == other


def bytes_of(change: Change) -> bytes:
    return msgspec.msgpack.encode(change)


class Noting(ViewsReplica):
    """A replica that notes the outcome of each change, which it makes unique."""

    world: World

    async def submit(self, log: Log, change: Change) -> ChangeOutcome:
        if not change.reads:
            change = msgspec.structs.replace(change, horizon=next(self.world.ids))
        outcome = await super().submit(log, change)
        self.world.told[bytes_of(change)] = outcome
        return outcome


class World:
    """All processes of one run, and what their callers got."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        time = Time()
        self.logs = Kept(time)
        self.logs.page_bytes_max = self.rng.choice((200, 1 << 22))
        self.late: list[Sequence[Entry]] = []
        self.ids = count(1)
        self.told: dict[bytes, ChangeOutcome] = {}
        self.reads: dict[bytes, Reads] = {}
        """What each transaction read, by its commands, which are unique."""
        self.seen: list[tuple[SeqNum, SeqNum, Read, object]] = []
        """Linearizable reads: earliest and latest state that they may show, and the value."""
        self.acknowledged: SeqNum = 0
        self.running = PROCESSES * CALLERS
        self.hosts = [None, None, frozenset({"m", "c"})][self.rng.randrange(3)]
        self.replicas: dict[int, tuple[Unreliable, Noting]] = {}

    def start(self, process: int) -> tuple[Unreliable, Noting]:
        """Return the log and the replica of a new incarnation of a process."""
        log = Unreliable(self.logs.log("objects"), self.rng, self.late)
        hosts = self.hosts if process == 0 else None
        hosting = Views(self.logs.log("objects"), hosts=hosts)._replica._hosting
        started = Noting(log.name, "views", hosting)
        started.world = self
        self.replicas[process] = log, started
        return log, started

    async def caller(self, process: int) -> None:
        """Run commands one after the other, in the present incarnation of the process."""
        for _ in range(STEPS):
            log, mine = self.replicas.get(process) or self.start(process)
            if log.is_dead:
                log, mine = self.start(process)
            views = Views(self.logs.log("objects"))
            views.log, views._replica = log, mine
            with suppress(AppendOutcomeUnknownError, ConflictError, IndexError, Crash):
                await self.step(views, hosts_all=not (self.hosts and process == 0))
                self.acknowledged = max(self.acknowledged, mine.end)
        self.running -= 1

    async def step(self, views: Views, *, hosts_all: bool) -> None:
        rng, key = self.rng, self.rng.choice(KEYS)
        numbers, counter = await self.opened(views, hosts_all=hosts_all)
        choice = rng.randrange(12)
        if choice == 0:
            await numbers.put(key, next(self.ids))
        elif choice == 1:
            await numbers.put_if_absent(key, next(self.ids))
        elif choice == 2:
            await numbers.replace(key, numbers.view.get(key, 0), next(self.ids))
        elif choice == 3:
            await numbers.update({k: next(self.ids) for k in KEYS[:2]})
        elif choice == 4:
            await (numbers.remove(key) if rng.random() < 0.7 else numbers.clear())
        elif choice == 5:
            await counter.add_within(rng.choice((-2, 1, 2)), at_least=0)
        elif choice in {6, 7}:
            await self.read(views, key)
        elif choice in {8, 9} or not hosts_all:
            await self.transaction(views, key)
        elif choice == 10:
            items = await views.list("l")
            await items.append(next(self.ids))
            await (items.pop(rng.randrange(-2, 2)) if rng.random() < 0.6 else items.set(0, 0))
        else:
            members = await views.set("s")
            await (members.add(key, "z") if rng.random() < 0.6 else members.discard(key))

    async def opened(self, views: Views, *, hosts_all: bool) -> tuple[Any, Any]:
        assert hosts_all or self.hosts
        return await views.map("m"), await views.counter("c")

    async def read(self, views: Views, key: object) -> None:
        """Make linearizable reads of one state."""
        since = self.acknowledged
        await views.sync()
        until = self.logs.position
        entries, value = await self.local(views, key)
        self.seen.append((since, until, ("m", key), entries))
        self.seen.append((since, until, ("c", WHOLE), value))

    async def local(self, views: Views, key: object) -> tuple[object, object]:
        state = views._replica.state
        entries, counted = state.machine("m"), state.machine("c")
        data = None if entries is None else entries.entries.get(key)  # type: ignore[attr-defined]
        value = 0 if counted is None else counted.value  # type: ignore[attr-defined]
        return None if data is None else VALUES.decode(data), value

    async def transaction(self, views: Views, key: str | int) -> None:
        numbers, counter = await views.map("m"), await views.counter("c")
        reads: list[Read] = []
        own = Transaction(views._replica, views.log)
        other = self.rng.choice(KEYS)
        async with own as txn:
            part = txn[numbers]
            if self.rng.random() < 0.2:
                part.items()
                reads.append(("m", WHOLE))
            part.get(key)
            reads.append(("m", key))
            if self.rng.random() < 0.5:
                await views.sync()
            if self.rng.random() < 0.3:
                _ = txn[counter].value
                reads.append(("c", WHOLE))
            part.put(other, next(self.ids))
            txn[counter].add(1)
            self.reads[msgspec.msgpack.encode(tuple(own._commands))] = own._horizon, reads

    async def append_late(self) -> None:
        """Let appends with an unknown outcome appear in the log, some time later."""
        log = SteppedLog(self.logs.log("objects"))
        while self.running:
            await log.tail()
            if self.late and self.rng.random() < 0.2:
                await log.append_batch(self.late.pop(self.rng.randrange(len(self.late))))

    def check(self) -> None:
        """Compare everything with the model."""
        model = Model(self.reads)
        model.replay(self.logs.kept)
        for change, outcome in self.told.items():
            assert model.outcomes[change] == outcome
        for since, until, what, value in self.seen:
            possible = [
                state[what]
                for place, (end, state) in enumerate(model.states)
                if end <= until
                and (place + 1 == len(model.states) or model.states[place + 1][0] > since)
            ]
            assert value in possible, f"{what} was {value!r} in [{since}, {until}]: {possible}"
        late = Views(self.logs.log("late"))
        views = ViewsReplica("objects", "views", late._replica._hosting)
        run_stepped([views.sync(SteppedLog(self.logs.log("objects")))], lambda ready: ready[0])
        model.check_state(views.state)


def run(seed: int) -> World:
    """Run all processes and compare their evidence with the model."""
    world = World(seed)
    callers = [world.caller(number % PROCESSES) for number in range(PROCESSES * CALLERS)]
    every, size = world.rng.choice((2, 3, 7)), world.rng.choice((1, 1 << 18))
    with mock.patch.multiple(replica, CHECKPOINT_EVERY=every, BYTES_MAX=size):
        run_stepped([*callers, world.append_late()], world.rng.choice)
    world.check()
    return world


@pytest.mark.parametrize("seed", range(SEEDS))
def test_all_processes_agree_with_a_sequential_model(seed: int) -> None:
    assert run(seed).told


def test_the_runs_reach_what_they_are_for() -> None:
    worlds = [run(seed) for seed in range(40)]
    told = [outcome for world in worlds for outcome in world.told.values()]
    assert sum(isinstance(outcome, Conflicted) for outcome in told) > 20
    assert sum(isinstance(outcome, Committed) for outcome in told) > 500
    assert any(world.logs.floor(b"objects\x1fsviews:views:changes") for world in worlds)


def found(plant: Callable[[], Any]) -> bool:
    """Whether a planted bug is found by one of the seeds."""
    with plant():
        for seed in range(PLANTED_SEEDS):
            try:
                run(seed)
            except AssertionError:
                return True
    return False


def test_commits_without_validation_are_found() -> None:
    assert found(lambda: mock.patch.object(RecentWrites, "is_written", return_value=False))


def test_checkpoints_without_recent_writes_are_found() -> None:
    right = RecentWrites.__init__

    def forgetful(self: RecentWrites, writes: object = (), floor: int = -1) -> None:
        right(self)

    assert found(lambda: mock.patch.object(RecentWrites, "__init__", forgetful))


def test_reads_that_are_not_fresh_are_found() -> None:
    async def stale(self: ViewsReplica, log: Log, within_s: float = 0.0) -> None:
        await self._replica.catch_up(log)

    assert found(lambda: mock.patch.object(ViewsReplica, "sync", stale))


def test_a_horizon_that_is_too_late_is_found() -> None:
    """A transaction that is validated from its commit on, not from its reads on."""
    right = Transaction.__aexit__

    async def late(self: Transaction, *error: Any) -> None:  # noqa: ANN401 - passed on
        self._horizon = self._replica.end
        await right(self, *error)

    assert found(lambda: mock.patch.object(Transaction, "__aexit__", late))
