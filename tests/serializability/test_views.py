"""Random transactions on views are strictly serializable, and the check detects views whose
transactions are not.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import Any
from unittest import mock

import pytest

from bokiviews import List, Map, Views, places, replica
from bokiviews.places import RecentWrites
from bokiviews.replica import ViewsReplica
from bokiviews.transaction import Transaction as ViewsTransaction
from indilog.base.log import Log, Session
from indilog.testing import MemoryLogs, cluster
from indilog.testing.stepper import Choose, SteppedLog, interleavings, run_stepped
from tests.serializability.checker import Transaction, violations
from tests.serializability.workload import (
    NAMES,
    PER_SESSION,
    ROUND,
    SESSIONS,
    History,
    LossyLog,
    Steps,
    _Clock,
    _noted,
)

TRANSACTIONS = 3000
PLANTED_ROUNDS = 20
PLATFORM_ROUNDS = 5


class Objects:
    """Three lists of values: each an object, or each under a key of one map."""

    def __init__(self, views: Views, lists: dict[str, List[int]] | None, of_map: Map[Any]) -> None:
        self.views = views
        self._lists = lists
        self._map = of_map

    @classmethod
    async def opened(cls, views: Views, *, are_lists: bool) -> Objects:
        """Open the objects."""
        lists = {name: await views.list(name, int) for name in NAMES} if are_lists else None
        return cls(views, lists, await views.map("map"))

    def read(self, txn: ViewsTransaction, name: str) -> list[int]:
        """Return the values, with the transaction's own."""
        if self._lists is not None:
            return txn[self._lists[name]].items()
        return list(txn[self._map].get(name, []))

    def append(self, txn: ViewsTransaction, name: str, value: int) -> None:
        """Add a value; in a map this reads the list, too."""
        if self._lists is not None:
            txn[self._lists[name]].append(value)
        else:
            txn[self._map][name] = [*self.read(txn, name), value]


async def followed(
    objects: Objects, inside: ViewsTransaction, steps: Steps, txn: Transaction, history: History
) -> None:
    """Run the steps within a transaction, and record the values read."""
    for kind, name in steps:
        own = txn.writes.setdefault(name, []) if kind != "read" else txn.writes.get(name, [])
        if kind != "push":
            listed = objects.read(inside, name)
            txn.reads.setdefault(name, tuple(listed[: len(listed) - len(own)]))
        if kind != "read":
            own.append(history.value())
            objects.append(inside, name, own[-1])
        if history.now % 3 == 0:
            await objects.views.sync()  # others' commits become visible within the body


class Client:
    """One process: runs transactions one after the other."""

    def __init__(self, log: Log, history: History, seed: int, *, are_lists: bool) -> None:
        self._random = random.Random(seed)
        self._log = LossyLog(log, self._random, rate=0.02)
        self._history = history
        self._are_lists = are_lists

    async def live(self) -> None:
        """Run its transactions; sometimes as a new process."""
        objects = await self._started()
        for _ in range(PER_SESSION):
            if self._random.random() < 0.1:
                objects = await self._started()
            await self._transaction(objects)

    async def _started(self) -> Objects:
        views = process(self._log, hosts=None)
        return await Objects.opened(views, are_lists=self._are_lists)

    async def _transaction(self, objects: Objects) -> None:
        steps = [
            (self._random.choice(("read", "read", "push", "append")), self._random.choice(NAMES))
            for _ in range(self._random.randint(1, 4))
        ]
        txn = self._history.begun()
        with _noted(self._history, txn):
            async with objects.views.transaction() as inside:
                await followed(objects, inside, steps, txn, self._history)


def process(log: Log, hosts: Sequence[str] | None) -> Views:
    """Return the views of a process that has read nothing."""
    views = Views(log, hosts=hosts)
    views._replica = ViewsReplica(log.name, "views", views._replica._hosting)
    return views


async def final(log: Log, *, are_lists: bool) -> dict[str, tuple[int, ...]]:
    """Return all lists, as a new process sees them."""
    objects = await Objects.opened(process(log, None), are_lists=are_lists)
    async with objects.views.transaction() as txn:
        return {name: tuple(objects.read(txn, name)) for name in NAMES}


def patched(chance: random.Random) -> Any:  # noqa: ANN401 - a context manager
    """Make checkpoints frequent, and forget writes early in some rounds."""
    recent = chance.choice((12, 16_384))
    return mock.patch.multiple(replica, CHECKPOINT_EVERY=chance.choice((2, 7))), mock.patch.object(
        places, "RECENT_MAX", recent
    )


def round_of(seed: int) -> list[str]:
    """Run one round and return its violations."""
    chance = random.Random(seed)
    log, history = MemoryLogs().log("objects"), History()
    are_lists = chance.random() < 0.5
    clients = [
        Client(log, history, chance.getrandbits(32), are_lists=are_lists) for _ in range(SESSIONS)
    ]

    def choose(ready: Sequence[int]) -> int:
        history.now += 1
        return chance.choice(ready)

    checkpoints, recent = patched(chance)
    with checkpoints, recent:
        run_stepped([client.live() for client in clients], choose)
        (lists,) = run_stepped(
            [final(SteppedLog(log), are_lists=are_lists)], lambda ready: ready[0]
        )
    return violations(history.transactions, lists)


def found() -> list[str]:
    """Return the findings of the first round that has any; empty: no round has."""
    return next(filter(None, map(round_of, range(PLANTED_ROUNDS))), [])


@pytest.mark.heavy
def test_random_transactions_are_strictly_serializable(transactions_wanted: int | None) -> None:
    for seed in range(-(-(transactions_wanted or TRANSACTIONS) // ROUND)):
        assert not round_of(seed), f"round_of({seed})"


@pytest.mark.asyncio
async def test_random_transactions_on_the_platform_are_strictly_serializable() -> None:
    """Real reads, of sessions that lag behind each other, during checkpoints and trims."""
    async with cluster() as client:
        for seed in range(PLATFORM_ROUNDS):
            chance, history = random.Random(seed), _Clock()
            logs = [client._logs.log(f"round-{seed}", Session()) for _ in range(SESSIONS)]
            clients = [
                Client(log, history, chance.getrandbits(32), are_lists=seed % 2 == 0)
                for log in logs
            ]
            with patched(chance)[0]:
                await asyncio.gather(*(client.live() for client in clients))
            lists = await final(logs[0], are_lists=seed % 2 == 0)
            assert not violations(history.transactions, lists), f"seed {seed}"


def test_the_check_detects_lost_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecentWrites, "is_written", lambda *_: False)
    assert any(line.startswith("lost") for line in found())


def test_the_check_detects_snapshot_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only reads of what is also written are validated: write skew (PITFALLS 11)."""
    right = ViewsTransaction.__aexit__

    async def written_only(self: ViewsTransaction, *error: Any) -> None:  # noqa: ANN401
        written = {
            place
            for command in self._commands
            for place in (
                *places.places_of_object(command.name),
                *(command.keys[at : at + 8] for at in range(0, len(command.keys), 8)),
            )
        }
        if self._commands:
            self._reads = {place: None for place in self._reads if place in written}
        await right(self, *error)

    monkeypatch.setattr(ViewsTransaction, "__aexit__", written_only)
    assert found()[0].startswith("cycle")


def test_the_check_detects_bodies_that_see_two_states(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(self: ViewsTransaction, *read: bytes) -> None:
        self._horizon = self._replica.end
        self._reads.update(dict.fromkeys(read))

    monkeypatch.setattr(ViewsTransaction, "note_reads", note)
    assert found()


def test_the_check_detects_reads_that_are_not_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stale(self: ViewsReplica, log: Log, within_s: float = 0.0) -> None:
        if not self.end:
            await self._replica.catch_up(log, fresh=True)

    monkeypatch.setattr(ViewsReplica, "sync", stale)
    assert found()[0].startswith("cycle")


PROGRAMS: tuple[Steps, ...] = (
    (("read", "x"), ("push", "y")),
    (("read", "y"), ("push", "x")),
    (("append", "x"),),
    (("append", "y"), ("append", "x")),
    (("read", "x"), ("read", "y")),
)


def pair_of(programs: Sequence[Steps], choose: Choose) -> tuple[list[str], int]:
    """Run transactions as `choose` decides; return the violations and the number of commits."""
    log, history = MemoryLogs().log("objects"), History()

    def ticking(ready: Sequence[int]) -> int:
        history.now += 1
        return choose(ready)

    async def live(steps: Steps, objects: Objects) -> None:
        txn = history.begun()
        with _noted(history, txn):
            async with objects.views.transaction() as inside:
                await followed(objects, inside, steps, txn, history)

    opened: list[Objects] = []

    async def open_all() -> None:
        for _ in programs:
            objects = await Objects.opened(process(SteppedLog(log), None), are_lists=True)
            opened.append(objects)

    run_stepped([open_all()], lambda ready: ready[0])
    run_stepped([live(*each) for each in zip(programs, opened, strict=True)], ticking)
    (lists,) = run_stepped([final(SteppedLog(log), are_lists=True)], lambda ready: ready[0])
    committed = sum(txn.outcome == "committed" for txn in history.transactions)
    return violations(history.transactions, lists), committed


@pytest.mark.parametrize("programs", tuple(combinations_with_replacement(PROGRAMS, 2)), ids=str)
def test_two_transactions_are_serializable_in_every_interleaving(
    programs: tuple[Steps, Steps],
) -> None:
    committed = set()
    for wrong, count in interleavings(lambda choose: pair_of(programs, choose)):
        assert not wrong
        committed.add(count)
    assert 2 in committed, "both commit in a serial order"
    assert 0 not in committed, "one of two conflicting transactions commits"
