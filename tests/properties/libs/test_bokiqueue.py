"""Queues in any interleaving of their consumers, against a plain replay of the log.

Each consumer is a process of its own; the stepper decides which one makes the next call of the log.
Their results (which consumer got which message, which acknowledgement took effect) must equal those
of a simple model that replays the log afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bokiqueue import Delivery, LeaseLostError, Queue, QueueReplica, waiting
from bokiqueue import shard as shard_module
from bokiqueue.records import (
    Acknowledge,
    CancelClaim,
    Claim,
    Command,
    ExtendClaim,
    PushMessage,
    Requeue,
    SetAside,
    decode_commands,
)
from indilog.base.errors import AppendOutcomeUnknownError
from indilog.base.log import Record, Session
from indilog.testing import MemoryLogs
from indilog.testing.stepper import Choose, SteppedLog, interleavings, run_stepped
from tests.support.elapsing_log import Kept, Time
from tests.support.repeated import repeated

SHARDS = 2


Settled = Acknowledge | Requeue | ExtendClaim


@dataclass
class Item:
    """A message in the model."""

    seqnum: int
    push: PushMessage
    state: str
    until: float
    claim: int = -1
    attempt: int = 0
    tries: int = 0


class Model:
    """A simple replay of one shard.

    Attributes:
        got: by the seqnum of a record, the messages that its claims got.
        done: by command, whether it took effect, each time that it appears.
    """

    def __init__(self) -> None:
        self.items: dict[int, Item] = {}
        self.got: dict[int, list[int]] = defaultdict(list)
        self.done: dict[Settled, list[bool]] = defaultdict(list)
        self.acknowledged: list[int] = []
        self.ids: set[bytes] = set()
        self.cancelled: set[int] = set()
        self.clock = 0.0

    def add(self, record: Record) -> None:
        self.clock = max(self.clock, record.ordered_at)
        for item in self.items.values():
            if item.state in {"leased", "delayed"} and item.until <= self.clock:
                self.rest(item)
        for command in decode_commands(record.data):
            self.apply(record.seqnum, command)

    def apply(self, seqnum: int, command: Command) -> None:
        match command:
            case PushMessage(delay_s=delay_s):
                state = "delayed" if delay_s else "ready"
                if command.id is None or command.id not in self.ids:
                    self.items[seqnum] = Item(seqnum, command, state, self.clock + delay_s)
                self.ids |= {command.id} if command.id is not None else set()
            case Claim():
                self.claim(seqnum, command)
            case CancelClaim(attempt):
                held = [i for i in self.items.values() if i.state == "leased"]
                held = [item for item in held if item.attempt == attempt]
                for item in held:
                    item.tries -= 1
                    self.rest(item)
                self.cancelled |= set() if held else {attempt}
            case Acknowledge() | Requeue() | ExtendClaim():
                for message in command.messages:
                    item = self.items[message]
                    is_held = item.state == "leased" and item.claim == command.claim
                    self.done[replace(command, messages=(message,))].append(is_held)
                    if is_held:
                        self.settle(item, command)
            case SetAside():
                pass
            case _:
                raise AssertionError(f"no command is {command}")

    def claim(self, seqnum: int, claim: Claim) -> None:
        if claim.attempt in self.cancelled:
            return
        ready = [item for item in self.items.values() if item.state == "ready"]
        ready.sort(key=lambda item: (-item.push.priority, item.seqnum))
        for item in ready[: claim.count]:
            self.got[seqnum].append(item.seqnum)
            item.state, item.claim, item.attempt = "leased", seqnum, claim.attempt
            item.until, item.tries = self.clock + claim.lease_s, item.tries + 1

    def settle(self, item: Item, command: Settled) -> None:
        if isinstance(command, Acknowledge):
            item.state = "done"
            self.acknowledged.append(item.seqnum)
        elif isinstance(command, ExtendClaim):
            item.until, item.attempt = self.clock + command.lease_s, 0
        elif command.delay_s and item.tries < item.push.tries_max:
            item.state, item.until = "delayed", self.clock + command.delay_s
        else:
            self.rest(item)

    def rest(self, item: Item) -> None:
        item.state = "ready" if item.tries < item.push.tries_max else "dead"


class Person:
    """One process, or one caller of those that share a `replica` in a process: executes its
    actions, and notes their results.
    """

    def __init__(self, logs: Kept, time: Time, replica: QueueReplica | None = None) -> None:
        self.logs = logs
        self.log = SteppedLog(logs.log("work", Session()))
        mine = QueueReplica("mail", SHARDS) if replica is None else replica
        self.queue = Queue(self.log, "mail", shards=SHARDS, tries=2, replica=mine)
        self.time = time
        self.held: list[Delivery] = []
        self.took: list[tuple[int, int]] = []
        """Claims and their messages."""
        self.reported: dict[Settled, list[bool | None]] = defaultdict(list)
        """By command, whether it took effect, each time; None: unknown."""

    async def live(self, program: Sequence[tuple[Any, ...]]) -> None:
        for action in program:
            match action:
                case ("push", priority, delay, key, push_id):
                    await self.queue.push(
                        b"x", priority=priority, delay=delay, shard_key=key, id=push_id
                    )
                case ("take", lease):
                    await self.take(lease)
                case ("take many", limit):
                    await self.take_many(limit)
                case ("acknowledge all",):
                    await self.acknowledge_all()
                case ("pass", seconds):
                    self.time.now += seconds
                case _:
                    await self.append(*action)

    async def take(self, lease: float) -> None:
        with contextlib.suppress(AppendOutcomeUnknownError):  # others have trimmed it
            if (delivery := await self.queue.take(lease=lease)) is not None:
                self.held.append(delivery)
                self.took.append((delivery.claim, delivery.seqnum))

    async def take_many(self, limit: int) -> None:
        with contextlib.suppress(AppendOutcomeUnknownError):  # others have trimmed it
            deliveries = await self.queue.pop_many(limit, lease=2.0).__aenter__()
            assert len(deliveries) <= limit
            self.held += deliveries
            self.took += [(delivery.claim, delivery.seqnum) for delivery in deliveries]

    async def acknowledge_all(self) -> None:
        """Acknowledge the messages of the oldest claim that this session holds."""
        if not self.held:
            return
        ones = [one for one in self.held if one.claim == self.held[0].claim]
        self.held = [one for one in self.held if one not in ones]
        with contextlib.suppress(AppendOutcomeUnknownError, LeaseLostError):
            await ones[0].acknowledge_all(ones)

    async def append(self, what: str, *options: float) -> None:
        if not self.held:
            return
        delivery = self.held.pop(0)
        claim, messages = delivery.claim, (delivery.seqnum,)
        command: Settled
        try:
            if what == "acknowledge":
                command = Acknowledge(claim, messages)
                await delivery.acknowledge()
            elif what == "requeue":
                command = Requeue(claim, messages, options[0])
                await delivery.requeue(delay=options[0])
            else:
                command = ExtendClaim(claim, messages, options[0])
                self.held.append(delivery)
                await delivery.extend(options[0])
        except LeaseLostError:
            self.reported[command].append(False)
        except AppendOutcomeUnknownError:
            self.reported[command].append(None)
        else:
            self.reported[command].append(True)


seconds = st.sampled_from([1.0, 2.0, 5.0])
actions = st.one_of(
    st.tuples(
        st.just("push"), st.sampled_from([0, 0, 1]), st.sampled_from([0.0, 0.0, 2.0]),
        st.sampled_from(["a", "b", "c"]), st.sampled_from([None, None, "1"]),
    ),
    st.tuples(st.just("take"), seconds),
    st.tuples(st.just("take"), seconds),
    st.tuples(st.just("take many"), st.integers(1, 3)),
    st.tuples(st.just("acknowledge")),
    st.tuples(st.just("acknowledge all")),
    st.tuples(st.just("requeue"), st.sampled_from([0.0, 1.0])),
    st.tuples(st.just("extend"), seconds),
    st.tuples(st.just("pass"), seconds),
)  # fmt: skip


def replayed(logs: Kept) -> list[Model]:
    models = [Model() for _ in range(SHARDS)]
    for record in logs.kept:
        for number, model in enumerate(models):
            if f"queue:mail:shard:{number}" in record.tags:
                model.add(record)
    return models


def check(logs: Kept, people: Sequence[Person]) -> list[Model]:
    models = replayed(logs)
    got = {claim: messages for model in models for claim, messages in model.got.items()}
    took = [one for person in people for one in person.took]
    assert len(set(took)) == len(took), "one consumer gets a claimed message"
    assert all(message in got.get(claim, ()) for claim, message in took)
    done = {command: held for model in models for command, held in model.done.items()}
    for person in people:
        for command, reported in person.reported.items():
            there = done.get(command, [])
            assert all(told in {held, None} for told, held in zip(reported, there, strict=False))
            assert all(told is None for told in reported[len(there) :])
    for model in models:
        assert len(set(model.acknowledged)) == len(model.acknowledged), "acknowledged once"
        firsts = list(dict.fromkeys(m for _, ms in sorted(model.got.items()) for m in ms))
        pushes = {m: model.items[m].push for m in firsts}
        usual = [m for m, push in pushes.items() if (push.priority, push.delay_s) == (0, 0.0)]
        assert usual == sorted(usual), "first deliveries are in the order of pushes"
    return models


@settings(max_examples=150, deadline=None)
@given(
    programs=st.lists(st.lists(actions, min_size=1, max_size=16), min_size=1, max_size=3),
    order_seed=st.integers(0, 2**32),
    checkpoint_every=st.sampled_from([2, 3, 1024]),
    is_shared=st.booleans(),
)
def test_every_consumer_gets_the_result_of_a_plain_replay_of_the_log(
    *,
    programs: list[list[tuple[Any, ...]]],
    order_seed: int,
    checkpoint_every: int,
    is_shared: bool,
) -> None:
    time = Time()
    logs = Kept(time)
    with (
        mock.patch.object(waiting, "seconds_now", time),
        mock.patch.object(shard_module, "CHECKPOINT_EVERY", checkpoint_every),
    ):
        replica = QueueReplica("mail", SHARDS) if is_shared else None
        people = [Person(logs, time, replica) for _ in programs]
        run_stepped(
            [person.live(program) for person, program in zip(people, programs, strict=True)],
            random.Random(order_seed).choice,
        )
    models = check(logs, people)
    for person in people:
        for shard in person.queue.replica.shards:
            shard.state.check_invariants()
            assert shard.end <= logs.position
    with mock.patch.object(waiting, "seconds_now", time):
        (stats,) = run_stepped([Person(logs, time).queue.stats()], lambda ready: ready[0])
    states = [item.state for model in models for item in model.items.values()]
    assert stats.dead == states.count("dead")
    assert stats.depth == len(states) - states.count("dead") - states.count("done")


def test_of_two_consumers_one_gets_the_message_in_every_interleaving() -> None:
    def run(choose: Choose) -> int:
        time = Time()
        logs = Kept(time)
        people = [Person(logs, time) for _ in range(2)]
        with mock.patch.object(waiting, "seconds_now", time):
            run_stepped([people[0].live([("push", 0, 0.0, "a", None)])], lambda ready: ready[0])
            for person in people:
                run_stepped([person.queue.replica.open(person.log)], lambda ready: ready[0])
            run_stepped([p.live([("take", 5.0)]) for p in people], choose)
        check(logs, people)
        return sum(len(person.took) for person in people)

    outcomes = list(interleavings(run))
    assert set(outcomes) == {1}
    assert len(outcomes) > 100


def test_two_callers_of_a_process_get_the_two_messages_in_every_interleaving() -> None:
    def run(choose: Choose) -> list[bool]:
        time = Time()
        logs = Kept(time)
        replica = QueueReplica("mail", SHARDS)
        with mock.patch.object(waiting, "seconds_now", time):
            pushes = [("push", 0, 0.0, "a", None), ("push", 0, 0.0, "a", None)]
            run_stepped([Person(logs, time).live(pushes)], lambda ready: ready[0])
            people = [Person(logs, time, replica) for _ in range(2)]
            run_stepped([replica.open(people[0].log)], lambda ready: ready[0])
            run_stepped([person.live([("take", 5.0)]) for person in people], choose)
        check(logs, people)
        return [len(person.took) == 1 for person in people]

    outcomes = list(interleavings(run))
    assert all(map(all, outcomes))
    assert len(outcomes) > 10


@pytest.mark.parametrize("consumes", ["afterwards", repeated("meanwhile")])
def test_a_push_of_two_executions_is_delivered_once_in_every_interleaving(consumes: str) -> None:
    """Two executions of a step push with the step's key; a third process consumes."""

    def run(choose: Choose) -> int:
        time = Time()
        logs = Kept(time)
        people = [Person(logs, time) for _ in range(3)]
        with mock.patch.object(waiting, "seconds_now", time):
            for person in people:
                run_stepped([person.queue.replica.open(person.log)], lambda ready: ready[0])
            push: list[tuple[Any, ...]] = [("push", 0, 0.0, "a", "shop/order-1/2")]
            take: list[tuple[Any, ...]] = [("take", 5.0), ("acknowledge",)]
            programs = (push, push, take) if consumes == "meanwhile" else (push, push)
            living = [p.live(program) for p, program in zip(people, programs, strict=False)]
            run_stepped(living, choose)
            run_stepped([people[2].live(take * 2)], lambda ready: ready[0])
        (model,) = [model for model in check(logs, people) if model.items]
        assert len(model.acknowledged) == 1
        return len(people[2].took)

    outcomes = list(interleavings(run))
    assert set(outcomes) == {1}
    assert len(outcomes) > (10 if consumes == "meanwhile" else 5)


@pytest.mark.heavy
@pytest.mark.asyncio
async def test_consumers_that_are_killed_at_random_lose_no_message() -> None:
    """Each message is acknowledged exactly once although consumers crash while they have it."""
    messages, shards = 2000, 4
    dice = random.Random(7)
    logs = MemoryLogs()

    def queue() -> Queue:
        return Queue(logs.log("work"), "mail", shards=shards, tries=1000)

    for number in range(messages):
        await queue().push(b"%d" % number, shard_key=str(number % 16))
    done: list[int] = []

    async def consume() -> None:
        while (delivery := await queue().take(wait=0.3, lease=0.1)) is not None:
            if dice.random() < 0.1:
                return  # killed: it neither acknowledges nor requeues
            await asyncio.sleep(0)
            with contextlib.suppress(LeaseLostError):
                await delivery.acknowledge()
                done.append(int(delivery.data))

    for _ in range(messages):
        await asyncio.gather(*(consume() for _ in range(8)))
        if len(done) >= messages:
            break
    assert sorted(done) == list(range(messages))
    stats = await queue().stats()
    assert (stats.depth, stats.dead) == (0, 0)
