"""Random transactions of many sessions over few objects, interleaved call by call."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Final, TypeAlias
from unittest import mock

from bokistore import (
    ConflictError,
    Store,
    ViewCache,
    checkpoints,
    collection,
    decisions,
    replay,
)
from bokistore import Transaction as StoreTransaction
from indilog.base.errors import AppendOutcomeUnknownError, TrimmedError
from indilog.base.ids import SeqNum, UserTag
from indilog.base.log import Log
from indilog.testing import MemoryLog, MemoryLogs
from indilog.testing.stepper import Choose, SteppedLog, run_stepped
from tests.serializability.checker import Transaction, violations

NAMES: Final = ("x", "y", "z")
SESSIONS: Final = 8
PER_SESSION: Final = 12
ROUND: Final = SESSIONS * PER_SESSION
"""Number of transactions of one round; each round has its own objects, so lists stay short."""
_DO: Final = ("read", "read", "push", "append", "append")

Steps: TypeAlias = Sequence[tuple[str, str]]
"""A step of a transaction: (`read`, `push` or `append`, object)."""


class LossyLog(SteppedLog):
    """A log that sometimes raises an unknown outcome for an append."""

    def __init__(self, log: Log, chance: random.Random, rate: float) -> None:
        super().__init__(log)
        self._chance = chance
        self._rate = rate

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        """Append, or not, and raise an unknown outcome."""
        fate = self._chance.random()
        if fate < self._rate / 2:
            raise AppendOutcomeUnknownError
        seqnum = await super().append(data, tags=tags)
        if fate < self._rate:
            raise AppendOutcomeUnknownError
        return seqnum


class History:
    """The transactions of all sessions of a round, and their shared clock."""

    def __init__(self) -> None:
        self.transactions: list[Transaction] = []
        self.now = 0
        self._values = count(1)
        self.wrong: list[str] = []
        self.winners: dict[str, int] = {}
        """By id the transaction that was reported as committed."""

    def begun(self) -> Transaction:
        """Return a new transaction, recorded in the history."""
        txn = Transaction(len(self.transactions), self.now)
        self.transactions.append(txn)
        return txn

    def value(self) -> int:
        """Return a unique value."""
        return next(self._values)


@contextmanager
def _noted(history: History, txn: Transaction) -> Iterator[None]:
    """Record how a transaction ends."""
    try:
        yield
        txn.outcome = "committed"
    except ConflictError:
        txn.outcome = "aborted"
    except (AppendOutcomeUnknownError, TrimmedError):
        txn.outcome = (
            "unknown"  # collections here keep no history, not even for running transactions
        )
    txn.ended = history.now


async def followed(
    inside: StoreTransaction, steps: Steps, txn: Transaction, history: History
) -> None:
    """Run the steps within a transaction of the store, and record the values read."""
    for kind, name in steps:
        own = txn.writes.setdefault(name, []) if kind != "read" else txn.writes.get(name, [])
        if kind == "push":
            own.append(history.value())
            inside.push(name, "l", own[-1])
            continue
        obj = await inside.get(name)
        listed: list[int] = obj.get("l", [])
        txn.reads.setdefault(name, tuple(listed[: len(listed) - len(own)]))
        if kind == "append":
            own.append(history.value())
            obj.set("l", [*listed, own[-1]])


class Session:
    """One client: runs transactions one after the other."""

    def __init__(self, log: Log, cache: ViewCache | None, history: History, seed: int) -> None:
        self._random = random.Random(seed)
        self._store = Store(LossyLog(log, self._random, rate=0.02), cache=cache)
        self._history = history

    async def live(self, transactions: int, forget: Callable[[], None]) -> None:
        """Run the given number of transactions; `forget` drops cached aux data."""
        for _ in range(transactions):
            kind = self._random.choices(
                ("transaction", "once", "single", "snapshot"), (70, 10, 10, 10)
            )[0]
            await getattr(self, kind)(self._steps())
            if self._random.random() < 0.05:
                forget()
            if self._random.random() < 0.03:
                with suppress(AppendOutcomeUnknownError):
                    await self._store.collect(keep=0.0)

    def _steps(self) -> Steps:
        return [
            (self._random.choice(_DO), self._random.choice(NAMES))
            for _ in range(self._random.randint(1, 4))
        ]

    async def transaction(self, steps: Steps) -> None:
        """Run a transaction, which may be aborted by a conflict."""
        txn = self._history.begun()
        with _noted(self._history, txn):
            async with self._store.transaction() as inside:
                await followed(inside, steps, txn, self._history)

    async def once(self, steps: Steps) -> None:
        """Run a transaction under an id shared with other sessions; each attempt is recorded
        separately.
        """
        txn_id = self._random.choice("abcdef")
        attempts: list[Transaction] = []

        async def body(inside: StoreTransaction) -> int:
            attempts.append(self._history.begun())
            await followed(inside, steps, attempts[-1], self._history)
            return attempts[-1].number

        try:
            winner = await self._store.transact(body, id=txn_id)
        except (ConflictError, AppendOutcomeUnknownError, TrimmedError):
            return  # the attempts keep an unknown outcome
        if self._history.winners.setdefault(txn_id, winner) != winner:
            self._history.wrong.append(f"id: {txn_id} committed as {winner}, and before")
        for attempt in attempts:
            attempt.outcome = "committed" if attempt.number == winner else "aborted"
            attempt.ended = self._history.now

    async def single(self, steps: Steps) -> None:
        """Run one operation, which returns the previous value."""
        txn = self._history.begun()
        name = steps[0][1]
        value = self._history.value()
        txn.writes[name] = [value]
        with _noted(self._history, txn):
            txn.reads[name] = tuple(await self._store.push(name, "l", value) or ())

    async def snapshot(self, steps: Steps) -> None:
        """Read several objects as of one seqnum."""
        txn = self._history.begun()
        with _noted(self._history, txn):
            async with self._store.snapshot() as view:
                for _, name in steps:
                    txn.reads[name] = tuple((await view.get(name)).get("l", []))


@contextmanager
def patched(chance: random.Random) -> Iterator[None]:
    """Make rare events frequent."""
    cell = chance.choice((2, 8))
    with (
        mock.patch.object(replay, "AUX_EVERY", chance.choice((1, 3, 8))),
        mock.patch.object(checkpoints, "CHECKPOINT_EVERY", chance.choice((2, 7))),
        mock.patch.object(decisions, "CELL", cell),
        mock.patch.object(collection, "CELL", cell),
    ):
        yield


def round_of(seed: int) -> list[str]:
    """Run one round and return its violations."""
    chance = random.Random(seed)
    page_bytes_max = chance.choice((200, 1 << 22))
    logs = MemoryLogs(page_bytes_max=page_bytes_max, clock=count(1).__next__)
    log = MemoryLog("objects", logs=logs)
    history = History()
    is_shared = chance.random() < 0.3
    sessions = [
        Session(log, None if is_shared else ViewCache(), history, chance.getrandbits(32))
        for _ in range(SESSIONS)
    ]

    def choose(ready: Sequence[int]) -> int:
        history.now += 1
        return chance.choice(ready)

    with patched(chance):
        run_stepped([session.live(PER_SESSION, log.logs.drop_aux) for session in sessions], choose)
        final = _final(log, NAMES)
    return history.wrong + violations(history.transactions, final)


class _Clock(History):
    """A history with a new moment at every reading; no stepper counts them."""

    @property
    def now(self) -> int:
        """The next moment."""
        return next(self._moments)

    @now.setter
    def now(self, moment: int) -> None:
        self._moments = count(moment)


async def round_on(logs: Sequence[Log], seed: int) -> list[str]:
    """Run one round on a platform, a session for each of `logs`; return its violations."""
    chance = random.Random(seed)
    history = _Clock()
    with patched(chance):
        sessions = [Session(log, ViewCache(), history, chance.getrandbits(32)) for log in logs]
        await asyncio.gather(*[session.live(PER_SESSION, lambda: None) for session in sessions])
        store = Store(logs[0], cache=ViewCache())
        objects = [await store.get(name) for name in NAMES]
    final = {obj.name: tuple(obj.get("l", [])) for obj in objects}
    return history.wrong + violations(history.transactions, final)


def pair_of(programs: Sequence[Steps], choose: Choose) -> tuple[list[str], int]:
    """Run transactions as `choose` decides; return the violations and the number of commits."""
    log = MemoryLog("objects", logs=MemoryLogs())
    history = History()
    run_stepped([Store(log).push(name, "l", 0) for name in "xy"], lambda ready: ready[0])
    first = Transaction(-1, -2, "committed", -1, writes={"x": [0], "y": [0]})

    def ticking(ready: Sequence[int]) -> int:
        history.now += 1
        return choose(ready)

    async def live(steps: Steps, cache: ViewCache) -> None:
        txn = history.begun()
        with _noted(history, txn):
            async with Store(SteppedLog(log), cache=cache).transaction() as inside:
                await followed(inside, steps, txn, history)

    # Warm caches, so that a read is one call and the interleavings can be counted.
    caches = [ViewCache() for _ in programs]
    for cache in caches:
        run_stepped([Store(log, cache=cache).get(name) for name in "xy"], lambda ready: ready[0])
    run_stepped([live(*each) for each in zip(programs, caches, strict=True)], ticking)
    final = _final(log, "xy")
    committed = sum(txn.outcome == "committed" for txn in history.transactions)
    return violations([first, *history.transactions], final), committed


def _final(log: MemoryLog, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return the list of each object, read by a store with empty caches."""
    store = Store(log, cache=ViewCache())
    objects = run_stepped([store.get(name) for name in names], lambda ready: ready[0])
    return {obj.name: tuple(obj.get("l", [])) for obj in objects}
