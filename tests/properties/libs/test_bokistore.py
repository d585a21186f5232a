"""BokiStore against a simple model: for all concurrent sessions and all contents of caches, all
replicas agree with a plain replay of the log.

The model shares no code with the library. It reads the records' JSON with the standard library, and
walks the log from its beginning. It decides each transaction by looking at everything before it,
and copies instead of changing in place.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from bokistore import (
    ConflictError,
    MismatchError,
    Obj,
    Store,
    Transaction,
    ViewCache,
    checkpoints,
    collection,
    decisions,
    replay,
)
from indilog.base.errors import TrimmedError
from indilog.testing import MemoryLog, MemoryLogs
from indilog.testing.stepper import SteppedLog, run_stepped

NAMES = ("a", "b", "c")
MISFIT = "misfit"
CONDITIONAL = ("decrement_if", "test_and_set", "append_if")
Json: TypeAlias = Any


# --- the model


def model_write(document: Json, write: list[Json]) -> tuple[Json, Json]:
    """Return the document after a write, and the previous value; MISFIT instead of the latter if
    the write does not fit.
    """
    kind, path, *rest = write
    old = document
    for step in path:
        old = old.get(step) if isinstance(old, dict) else None
    if kind in {"decrement_if", "set_if", "append_if"}:
        return model_conditional(document, kind, path, old, rest)
    if kind in {"delete", "pop"}:
        without = model_without(document, path), old
        return without if kind == "delete" else model_popped(document, path)
    if not path:
        if kind == "merge":
            return model_merged(document, rest[0]), old
        fits = kind == "set" and isinstance(rest[0], dict)
        return (rest[0], old) if fits else (document, MISFIT)
    at = {} if document is None else document
    for step in path[:-1]:
        at = at.get(step, {})
        if not isinstance(at, dict):
            return document, MISFIT
    present = path[-1] in at
    new = model_value(kind, old if present else None, rest, present=present)
    return (document, MISFIT) if new is MISFIT else (model_with(document, path, new), old)


def model_conditional(
    document: Json, kind: str, path: list[str], old: Json, rest: list[Json]
) -> tuple[Json, Json]:
    """Do the same as `model_write` for a write with a condition; the second is the result of the
    caller: the new number, or whether the condition held.
    """
    if kind == "decrement_if":
        after, misfit = model_write(document, ["increment", path, -rest[0]])
        if misfit is MISFIT:
            return document, MISFIT
        new = model_get(after, path)
        return (after, new) if new >= rest[1] else (document, None)
    if kind == "set_if":
        if not same(old, rest[0]):
            return document, False
        after, misfit = model_write(document, ["set", path, rest[1]])
    else:
        items = old if isinstance(old, list) else []
        texts = [json.dumps(item, sort_keys=True) for item in items]
        if rest[1] and json.dumps(rest[0], sort_keys=True) in texts:
            return document, False
        if rest[2] is not None and len(items) >= rest[2]:
            return document, False
        after, misfit = model_write(document, ["push", path, rest[0], None])
    return (document, MISFIT) if misfit is MISFIT else (after, True)


def model_get(document: Json, path: list[str]) -> Json:
    for step in path:
        document = document[step]
    return document


def model_value(kind: str, old: Json, rest: list[Json], *, present: bool) -> Json:
    if kind in {"set", "merge"}:
        return rest[0] if kind == "set" else model_merged(old, rest[0])
    if kind == "increment":
        if not present:
            return rest[0]
        return old + rest[0] if isinstance(old, int) and not isinstance(old, bool) else MISFIT
    if present and not isinstance(old, list):
        return MISFIT
    items = list(old) if present else []
    known = [json.dumps(item, sort_keys=True) for item in items]
    if kind == "push" or json.dumps(rest[0], sort_keys=True) not in known:
        items = [*items, rest[0]]
    limit = rest[1] if kind == "push" else None
    return items[max(0, len(items) - limit) :] if limit else items


def model_merged(old: Json, patch: Json) -> Json:
    if not isinstance(patch, dict):
        return patch
    base = old if isinstance(old, dict) else {}
    return {key: value for key, value in base.items() if key not in patch} | {
        key: model_merged(base.get(key), value) for key, value in patch.items() if value is not None
    }


def model_popped(document: Json, path: list[str]) -> tuple[Json, Json]:
    if not path:
        return document, MISFIT
    there = document
    for step in path:
        if not isinstance(there, dict) or step not in there:
            return document, None
        there = there[step]
    if not isinstance(there, list):
        return document, MISFIT
    return (model_with(document, path, there[:-1]), there[-1]) if there else (document, None)


def model_with(document: Json, path: list[str], value: Json) -> Json:
    if not path:
        return copy.deepcopy(value)
    inside = dict(document) if isinstance(document, dict) else {}
    inside[path[0]] = model_with(inside.get(path[0]), path[1:], value)
    return inside


def model_without(document: Json, path: list[str]) -> Json:
    if not path:
        return None
    if not isinstance(document, dict) or path[0] not in document:
        return document
    if len(path) == 1:
        return {key: value for key, value in document.items() if key != path[0]}
    inside = document[path[0]]
    changed = model_without(inside, path[1:]) if isinstance(inside, dict) else inside
    return {**document, path[0]: changed}


@dataclass
class Model:
    """The state according to the log: `states[n]` is every object as of the records below n."""

    states: list[dict[str, Json]] = field(default_factory=lambda: [dict.fromkeys(NAMES)])
    committed: list[bool] = field(default_factory=list)
    written: list[set[str]] = field(default_factory=list)
    olds: list[Json] = field(default_factory=list)
    collected: int = 0
    unsaid: set[int] = field(default_factory=set)
    """Aborted transactions that a collection skipped."""
    results: dict[str, Json] = field(default_factory=dict)
    """By id what the one transaction that counts recorded."""

    def add(self, data: bytes) -> None:
        command = json.loads(data)
        seqnum = len(self.committed)
        if (kept := command.get("checkpoint")) is not None:
            then = self.states[kept["seqnum"] + 1][kept["name"]]
            assert same(kept["value"], then), "a checkpoint is what the object was"
        if (kept := command.get("collected")) is not None:
            aborted = {s for s in range(kept["start"], kept["end"]) if not self.committed[s]}
            assert aborted.issuperset(kept["aborted"])
            self.unsaid |= aborted.difference(kept["aborted"])
            self.collected = max(self.collected, kept["end"])
        since = range(command.get("horizon", 0), seqnum)
        reads = set(command.get("reads", ()))
        holds = not any(self.committed[s] and self.written[s] & reads for s in since)
        if ids := command.get("ids"):
            holds = holds and not ids.keys() & self.results.keys()
            if holds:
                self.results |= ids
        state, old = dict(self.states[-1]), None
        for name, writes in command["writes"].items() if holds else ():
            for write in writes:
                state[name], old = model_write(state[name], write)
        self.states.append(state)
        self.committed.append(holds)
        self.written.append(set(command["writes"]))
        self.olds.append(old)


# --- what sessions do

names = st.sampled_from(NAMES)
paths = st.sampled_from(["n", "l", "o", "o.n", "o.l", ""])
values = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([None, True, "x", [], [1], {}, {"n": 1}, {"l": ["y"]}, {"n": {"n": 2}}]),
)
writes = st.one_of(
    st.tuples(st.just("set"), paths, values),
    st.tuples(st.just("increment"), paths, st.integers(-3, 3)),
    st.tuples(st.just("push"), paths, values, st.sampled_from([None, 1, 2])),
    st.tuples(st.just("add_to_set"), paths, values),
    st.tuples(st.just("pop"), paths),
    st.tuples(
        st.just("merge"), paths, st.sampled_from([{}, {"n": None}, {"o": {"n": 1, "l": None}}])
    ),
    st.tuples(st.just("delete"), st.one_of(st.none(), paths)),
    st.tuples(st.just("decrement_if"), paths, st.integers(-3, 3), st.integers(-2, 2)),
    st.tuples(st.just("test_and_set"), paths, values, values),
    st.tuples(st.just("append_if"), paths, values, st.booleans(), st.sampled_from([1, 2])),
)
plain_writes = writes.filter(lambda write: write[0] not in CONDITIONAL)
"""Blind writes of transactions have no conditions."""
reads_and_writes = st.lists(
    st.one_of(st.tuples(names), st.tuples(names, plain_writes)), min_size=1, max_size=5
)
read_then_write = st.builds(lambda name, write: [(name,), (name, write)], names, plain_writes)
actions = st.one_of(
    st.tuples(st.just("get"), names),
    st.tuples(st.just("write"), names, writes),
    st.tuples(st.just("transaction"), st.one_of(reads_and_writes, read_then_write)),
    st.tuples(st.just("once"), st.sampled_from("xy"), reads_and_writes),
    st.tuples(st.just("vanish"), st.integers(0, 40)),
    st.tuples(st.just("collect")),
)


def arguments(write: Sequence[Json]) -> tuple[str, tuple[Json, ...], dict[str, Json]]:
    kind, *rest = write
    if kind == "push":
        return kind, (rest[0], rest[1]), {"limit": rest[2]}
    if kind == "append_if":
        return kind, (rest[0], rest[1]), {"absent": rest[2], "limit": rest[3]}
    return kind, (*rest,), {}


class Person:
    """One session: executes its actions, and notes their results."""

    def __init__(self, log: MemoryLog, cache: ViewCache | None) -> None:
        self.log = SteppedLog(log)
        self.memory = log.logs
        self.store = Store(self.log, cache=cache)
        self.reported: list[tuple[int, Json]] = []
        self.outcomes: list[tuple[int, bool]] = []
        self.seen: list[tuple[int, str, Json]] = []
        self.results: list[tuple[str, Json]] = []
        self.forgotten: list[str] = []

    async def live(self, program: Sequence[tuple[Json, ...]]) -> None:
        for action in program:
            match action:
                case ("get", name):
                    await self.get(name)
                case ("write", name, write):
                    await self.write(name, write)
                case ("transaction", steps):
                    await self.transaction(steps)
                case ("once", txn_id, steps):
                    await self.once(txn_id, steps)
                case ("collect",):
                    await self.store.collect(keep=0.0)
                case _:
                    self.memory.drop_aux(action[1])

    async def get(self, name: str) -> None:
        earliest = self.memory.position
        value = document_of(await self.store.get(name))
        self.seen.append((-earliest - 1, name, value))

    async def write(self, name: str, write: Sequence[Json]) -> None:
        kind, args, options = arguments(write)
        count = len(self.log.appended)
        try:
            old = await getattr(self.store, kind)(name, *args, **options)
        except MismatchError:
            old = MISFIT
        self.reported.append((self.log.appended[count], old))  # a checkpoint may follow

    async def transaction(self, steps: Sequence[tuple[Json, ...]]) -> None:
        count, began = len(self.log.appended), self.memory.position
        seen: dict[str, Json] = {}
        txn = self.store.transaction()
        committed = True
        try:
            async with txn:
                for name, *write in steps:
                    if write:
                        self.blindly(txn, name, write[0])
                    elif name not in txn._writes:
                        seen[name] = document_of(await txn.get(name))
        except ConflictError:
            committed = False
        if seen:
            assert txn._horizons[0] >= began, "the snapshot is not older than the transaction"
            self.seen += [(txn._horizons[0], name, value) for name, value in seen.items()]
        if len(self.log.appended) > count:
            self.outcomes.append((self.log.appended[count], committed))

    async def once(self, txn_id: str, steps: Sequence[tuple[Json, ...]]) -> None:
        async def body(txn: Transaction) -> Json:
            for name, *write in steps:
                if write:
                    self.blindly(txn, name, write[0])
                elif name not in txn._writes:
                    await txn.get(name)
            return [id(self), self.memory.position]

        try:
            result = await self.store.transact(body, id=txn_id, retries=50)
        except TrimmedError:
            self.forgotten.append(txn_id)
        else:
            self.results.append((txn_id, result))

    def blindly(self, txn: Transaction, name: str, write: Sequence[Json]) -> None:
        kind, args, options = arguments(write)
        try:
            getattr(txn, kind)(name, *args, **options)
        except MismatchError:
            assert name in txn._objects, "only what was read can be known not to fit"


def document_of(obj: Obj) -> Json:
    return copy.deepcopy(obj.value) if obj.exists else None


def finished(execution: Coroutine[Any, Any, Json]) -> Json:
    (result,) = run_stepped([execution], lambda ready: ready[0])
    return result


@settings(max_examples=150, deadline=None)
@given(
    programs=st.lists(st.lists(actions, min_size=1, max_size=16), min_size=1, max_size=3),
    order_seed=st.integers(0, 2**32),
    aux_every=st.integers(1, 4),
    is_shared=st.booleans(),
    has_tiny_caches=st.booleans(),
    page_bytes_max=st.sampled_from([1, 4096]),
    checkpoint_every=st.integers(1, 5),
    cell=st.integers(1, 5),
)
def test_every_reader_sees_the_result_of_a_plain_replay_of_the_log(
    *,
    programs: list[list[tuple[Json, ...]]],
    order_seed: int,
    aux_every: int,
    is_shared: bool,
    has_tiny_caches: bool,
    page_bytes_max: int,
    checkpoint_every: int,
    cell: int,
) -> None:
    clock = count(1).__next__
    log = MemoryLog("objects", logs=MemoryLogs(page_bytes_max=page_bytes_max, clock=clock))

    def cache() -> ViewCache | None:
        if is_shared:
            return None
        return ViewCache(objects_max=1, decisions_max=1) if has_tiny_caches else ViewCache()

    people = [Person(log, cache()) for _ in programs]
    with (
        mock.patch.object(replay, "AUX_EVERY", aux_every),
        mock.patch.object(checkpoints, "CHECKPOINT_EVERY_SMALL", checkpoint_every),
        mock.patch.object(decisions, "CELL", cell),
        mock.patch.object(collection, "CELL", cell),
    ):
        run_stepped(
            [person.live(program) for person, program in zip(people, programs, strict=True)],
            random.Random(order_seed).choice,
        )
        check_all(people, log)


def check_all(people: Sequence[Person], log: MemoryLog) -> None:
    """Compare the results of each process, and those of a new process, with the model."""
    model = Model()
    for seqnum in range(log.logs.position):
        record = log.logs.record(seqnum)
        assert record is not None
        model.add(record.data)
    assert all(map(log.logs.is_dead, model.unsaid)), "no read can ask about them"
    for person in people:
        check(person, model)
    for _ in ("with what aux data there is", "without any"):
        for store in (Store(log), Store(log, cache=ViewCache())):
            final = {name: document_of(finished(store.get(name))) for name in NAMES}
            assert same(final, model.states[-1])
            span = range(model.collected, len(model.committed))
            for seqnum in (*span[:2], *span[-1:]):
                then = store.at(seqnum)
                past = {name: document_of(finished(then.get(name))) for name in NAMES}
                assert same(past, model.states[seqnum + 1]), "time travel within the span"
        log.logs.drop_aux()


def check(person: Person, model: Model) -> None:
    for seqnum, old in person.reported:
        assert same(old, model.olds[seqnum])
    for seqnum, committed in person.outcomes:
        assert committed == model.committed[seqnum]
    for txn_id, result in person.results:
        assert same(result, model.results[txn_id])
    assert model.results.keys() >= set(person.forgotten), "only what was done can be forgotten"
    for place, name, value in person.seen:
        if place >= 0:
            assert same(value, model.states[place][name])
        else:
            assert any(same(value, state[name]) for state in model.states[-place - 1 :])


def same(one: Json, other: Json) -> bool:
    """Equal as JSON, so that 1 and true differ."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


@settings(max_examples=100, deadline=None)
@given(
    amounts=st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=2, max_size=3),
    order_seed=st.integers(0, 2**32),
)
def test_transfers_in_transactions_keep_the_sum(amounts: list[list[int]], order_seed: int) -> None:
    """Each person moves money between two accounts, by reading and setting; none is lost."""
    log = MemoryLog("objects")
    finished(Store(log).set("a", "n", 10))
    finished(Store(log).set("b", "n", 10))

    async def live(mine: Sequence[int]) -> None:
        store = Store(SteppedLog(log), cache=ViewCache())
        for amount in mine:
            try:
                async with store.transaction() as txn:
                    a, b = await txn.get("a"), await txn.get("b")
                    a.set("n", a["n"] - amount)
                    b.set("n", b["n"] + amount)
            except ConflictError:
                assert len(amounts) > 1, "one alone is never in conflict"

    run_stepped([live(mine) for mine in amounts], random.Random(order_seed).choice)
    final = Store(log, cache=ViewCache())
    assert finished(final.get("a"))["n"] + finished(final.get("b"))["n"] == 20
