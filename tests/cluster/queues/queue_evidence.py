"""Checks the observations of a queue's producers and consumers against its log.

The check shares only the format of records with the library. It replays the records of a shard in
the simplest way, first in, first out, to find when each consumer held each message. The consumers'
reports must agree with the replay. It supports no priorities and no dead letters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TypeAlias

from bokiqueue.records import (
    Acknowledge,
    CancelClaim,
    Claim,
    Command,
    PushMessage,
    Requeue,
    SetAside,
    decode_commands,
)
from indilog.base.log import Record

Held: TypeAlias = tuple[int, int]
"""A delivery: the seqnum of its claim, and the seqnum of its message."""


@dataclass
class Reported:
    """The output of one consumer process until it was killed."""

    got: dict[Held, int] = field(default_factory=dict)
    """The number of the message of each delivery."""
    done: set[Held] = field(default_factory=set)
    late: set[Held] = field(default_factory=set)

    def hear(self, line: bytes) -> None:
        """Add a line of output; an incomplete line is ignored."""
        if not line.endswith(b"\n"):
            return
        word, claim, seqnum, number = line.split()
        if word == b"got":
            self.got[int(claim), int(seqnum)] = int(number)
        else:
            {b"done": self.done, b"late": self.late}[word].add((int(claim), int(seqnum)))

    @property
    def open(self) -> set[Held]:
        """Deliveries whose acknowledgement has an unknown outcome."""
        return self.got.keys() - self.done - self.late


class Replayed:
    """One shard, replayed from its records."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.pushed: dict[int, int] = {}
        self.got: set[Held] = set()
        self.acknowledged: list[int] = []
        self.in_time: set[Held] = set()
        """Deliveries whose acknowledgement counted."""
        self._ready: list[int] = []
        self._leased: dict[int, tuple[float, int, int]] = {}
        """By message: end of the lease, claim, attempt."""
        self._cancelled: set[int] = set()
        self._clock = 0.0
        for record in records:
            self._clock = max(self._clock, record.ordered_at)
            for message, (until, _, _) in list(self._leased.items()):
                if until <= self._clock:
                    self._release(message)
            for command in decode_commands(record.data):
                self._add(record.seqnum, command)

    def _release(self, message: int) -> None:
        del self._leased[message]
        heappush(self._ready, message)

    def _add(self, seqnum: int, command: Command) -> None:
        match command:
            case PushMessage(data=data, priority=0, delay_s=0.0):
                self.pushed[seqnum] = int(data)
                heappush(self._ready, seqnum)
            case Claim():
                self._claim(seqnum, command)
            case CancelClaim(attempt=attempt):
                held = [m for m, (_, _, of) in self._leased.items() if of == attempt]
                self._cancelled |= set() if held else {attempt}
                for message in held:
                    self._release(message)
            case Acknowledge(claim=claim, messages=(message,)):
                if self._leased.get(message, (0.0, -1, 0))[1] == claim:
                    del self._leased[message]
                    self.in_time.add((claim, message))
                    self.acknowledged.append(message)
            case Requeue(claim=claim, messages=(message,), delay_s=0.0):
                if self._leased.get(message, (0.0, -1, 0))[1] == claim:
                    self._release(message)
            case SetAside():
                pass  # a copy of its data; the message keeps its place
            case other:
                raise AssertionError(f"unknown event {other}")

    def _claim(self, seqnum: int, claim: Claim) -> None:
        if claim.attempt in self._cancelled:
            return
        for _ in range(min(claim.count, len(self._ready))):
            first = heappop(self._ready)
            self.got.add((seqnum, first))
            self._leased[first] = (self._clock + claim.lease_s, seqnum, claim.attempt)


def faults(
    pushed: dict[int, int], consumers: Sequence[Reported], shards: Sequence[Replayed]
) -> list[str]:
    """Yield contradictions in words; `pushed`: seqnum and number of each push that returned.

    The guarantees: every message is acknowledged exactly once, and none is lost or invented. Each
    consumer got what a replay gives it, which is the first message in line.
    """
    return [
        *_of_messages(pushed, shards),
        *_of_answers(consumers, shards),
        *_of_counts(pushed, consumers),
    ]


def _of_messages(pushed: dict[int, int], shards: Sequence[Replayed]) -> Iterable[str]:
    there = {seqnum: number for shard in shards for seqnum, number in shard.pushed.items()}
    if there != pushed:
        yield f"{len(there.items() ^ pushed.items())} messages are not what was pushed"
    times = Counter(message for shard in shards for message in shard.acknowledged)
    if never := pushed.keys() - times.keys():
        yield f"{len(never)} messages were never acknowledged"
    if twice := [message for message, count in times.items() if count > 1]:
        yield f"{len(twice)} messages were acknowledged twice in the log"


def _of_answers(consumers: Sequence[Reported], shards: Sequence[Replayed]) -> Iterable[str]:
    held = {delivery for shard in shards for delivery in shard.got}
    in_time = {delivery for shard in shards for delivery in shard.in_time}
    for consumer in consumers:
        if wrong := consumer.got.keys() - held:
            yield f"{len(wrong)} claims got another message than they held"
        if wrong := consumer.done - in_time:
            yield f"{len(wrong)} acknowledgements were confirmed that came too late"
        if wrong := consumer.late & in_time:
            yield f"{len(wrong)} acknowledgements were refused that came in time"
    times = Counter(delivery for consumer in consumers for delivery in consumer.got)
    if twice := [delivery for delivery, count in times.items() if count > 1]:
        yield f"{len(twice)} deliveries went to two consumers"


def _of_counts(pushed: dict[int, int], consumers: Sequence[Reported]) -> Iterable[str]:
    """Yield the contradictions in the consumers' output alone."""
    done = Counter(
        (delivery[1], consumer.got[delivery])
        for consumer in consumers
        for delivery in consumer.done & consumer.got.keys()
    )
    if twice := [message for message, count in done.items() if count > 1]:
        yield f"{len(twice)} messages were confirmed twice"
    maybe = {(one[1], consumer.got[one]) for consumer in consumers for one in consumer.open}
    if lost := pushed.items() - done.keys() - maybe:
        yield f"{len(lost)} messages are gone that no consumer had in its hands"
    if invented := (done.keys() | maybe) - pushed.items():
        yield f"{len(invented)} messages were delivered that were never pushed"
