"""Checks the observations of a queue's producers and consumers against its log.

The check shares only the format of records with the library. It replays the records of a shard in
the simplest way, to find when each consumer held each message. The consumers' reports must agree
with the replay. It supports no priorities and no dead letters, and treats messages with a delay as
not due.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from bokiqueue.records import Acknowledge, Claim, PushMessage, decode_command
from indilog.base.log import Record


@dataclass
class Reported:
    """The output of one consumer process until it was killed; claims are identified by seqnum."""

    got: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By claim, the seqnum and the number of the message."""
    done: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)

    def hear(self, line: bytes) -> None:
        """Add a line of output; an incomplete line is ignored."""
        if not line.endswith(b"\n"):
            return
        word, claim, seqnum, number = line.split()
        if word == b"got":
            self.got[int(claim)] = (int(seqnum), int(number))
        else:
            {b"done": self.done, b"late": self.late}[word].add(int(claim))

    @property
    def open(self) -> set[int]:
        """Claims whose acknowledgement has an unknown outcome."""
        return self.got.keys() - self.done - self.late


class Replayed:
    """One shard, replayed from its records."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.pushed: dict[int, int] = {}
        self.got: dict[int, int | None] = {}
        """By claim, the message that was first in line."""
        self.acknowledged: list[int] = []
        self.in_time: set[int] = set()
        """Claims whose acknowledgement counted."""
        self._ready: list[int] = []
        self._leased: dict[int, tuple[float, int]] = {}
        self._clock = 0.0
        for record in records:
            self._add(record)

    def _add(self, record: Record) -> None:
        self._clock = max(self._clock, record.ordered_at)
        for message, (until, _) in list(self._leased.items()):
            if until <= self._clock:
                del self._leased[message]
                heappush(self._ready, message)
        match decode_command(record.data):
            case PushMessage(delay_s=delay_s) if delay_s:
                pass  # not due yet
            case PushMessage(data=data, priority=0):
                self.pushed[record.seqnum] = int(data)
                heappush(self._ready, record.seqnum)
            case Claim(count=1, lease_s=lease_s):
                first = heappop(self._ready) if self._ready else None
                self.got[record.seqnum] = first
                if first is not None:
                    self._leased[first] = (self._clock + lease_s, record.seqnum)
            case Acknowledge(claim=claim, messages=(message,)):
                if self._leased.get(message, (0.0, -1))[1] == claim:
                    del self._leased[message]
                    self.in_time.add(claim)
                    self.acknowledged.append(message)
            case other:
                raise AssertionError(f"unknown event {other}")


def faults(
    pushed: dict[int, int], consumers: Sequence[Reported], shards: Sequence[Replayed]
) -> list[str]:
    """Yield contradictions in words; `pushed`: seqnum and number of each push that returned.

    The guarantees: every message is acknowledged exactly once, none is lost or invented, each
    consumer's output agrees with the log, and the first deliveries of a shard are in the order of
    pushes.
    """
    return [
        *_of_messages(pushed, shards),
        *_of_answers(consumers, shards),
        *_of_counts(pushed, consumers),
        *_of_order(consumers, shards),
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
    held = {claim: message for shard in shards for claim, message in shard.got.items()}
    in_time = {claim for shard in shards for claim in shard.in_time}
    for consumer in consumers:
        if wrong := {c for c, (message, _) in consumer.got.items() if held.get(c) != message}:
            yield f"{len(wrong)} claims got another message than they held"
        if wrong := consumer.done - in_time:
            yield f"{len(wrong)} acknowledgements were confirmed that came too late"
        if wrong := consumer.late & in_time:
            yield f"{len(wrong)} acknowledgements were refused that came in time"


def _of_counts(pushed: dict[int, int], consumers: Sequence[Reported]) -> Iterable[str]:
    """Yield the contradictions in the consumers' output alone."""
    done = Counter(
        consumer.got[claim]
        for consumer in consumers
        for claim in consumer.done & consumer.got.keys()
    )
    if twice := [message for message, count in done.items() if count > 1]:
        yield f"{len(twice)} messages were confirmed twice"
    maybe = {consumer.got[claim] for consumer in consumers for claim in consumer.open}
    if lost := pushed.items() - done.keys() - maybe:
        yield f"{len(lost)} messages are gone that no consumer had in its hands"
    if invented := (done.keys() | maybe) - pushed.items():
        yield f"{len(invented)} messages were delivered that were never pushed"


def _of_order(consumers: Sequence[Reported], shards: Sequence[Replayed]) -> Iterable[str]:
    reported = {claim: seen[0] for consumer in consumers for claim, seen in consumer.got.items()}
    for number, shard in enumerate(shards):
        for what, claims in (("by the log", shard.got), ("as reported", reported)):
            deliveries = (claims.get(claim) for claim in sorted(shard.got))
            firsts = list(dict.fromkeys(m for m in deliveries if m is not None))
            missing = set() if what == "by the log" else _unheard(shard, reported)
            if (heard := [m for m in firsts if m not in missing]) != sorted(heard):
                yield f"shard {number} is not first in, first out {what}"


def _unheard(shard: Replayed, reported: dict[int, int]) -> set[int]:
    """Messages whose first delivery went to a consumer that was killed before it printed it."""
    firsts: dict[int, int] = {}
    for claim, message in sorted(shard.got.items()):
        if message is not None:
            firsts.setdefault(message, claim)
    return {message for message, claim in firsts.items() if claim not in reported}
