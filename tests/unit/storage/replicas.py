"""Two replicas of one shard, for tests of repair between them."""

from __future__ import annotations

from indilog.base.ids import Epoch, LocalId, NodeId, ShardId
from indilog.config import Config
from indilog.kernel.view import view_of
from indilog.roles.role import Location, Send
from indilog.wire.messages import (
    AppendBatch,
    Message,
)
from indilog_storage.shard import Shard
from tests.unit.storage.machine import (
    ENGINE,
    PRIMARY,
    SHARD,
    Machine,
    batch,
    config_of,
    data_of,
    entries,
    read,
)

VIEW = view_of(storage_nodes=2, replicas=2)
A, B = NodeId("storage-0"), NodeId("storage-1")
E1, E2 = Epoch(1), Epoch(2)


class Pair:
    """Two replicas of one shard whose messages reach each other."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or config_of()
        self.nodes = {name: Machine(VIEW, self.config, name) for name in (A, B)}

    def tell(self, name: NodeId, *reported: Message, sender: NodeId = ENGINE) -> list[Send]:
        return self._deliver(name, self.nodes[name].tell(*reported, sender=sender))

    def tell_both(self, *reported: Message, sender: NodeId = ENGINE) -> None:
        for name in (A, B):
            self.tell(name, *reported, sender=sender)

    def open(self, epoch: int = 1) -> None:
        """Let the next entry name a new writer."""
        for name in (A, B):
            self._deliver(name, self.nodes[name].open(epoch))

    def wait(self, seconds: float) -> None:
        for name in (A, B):
            self._deliver(name, self.nodes[name].wait(seconds))

    def settle(self) -> None:
        """Advance both clocks past the pause after which questions are resent."""
        for _ in range(20):
            self.wait(2.0)

    def wipe(self, name: NodeId) -> None:
        self.nodes[name] = Machine(VIEW, self.config, name)

    def restart(self, name: NodeId) -> None:
        self.start(self.nodes[name].restarted())

    def start(self, machine: Machine) -> Machine:
        """Put a started node in the place of the one before it; return it."""
        self.nodes[machine.name] = machine
        self._deliver(machine.name, machine.started)
        return machine

    def _deliver(self, sender: NodeId, sent: list[Send]) -> list[Send]:
        others: list[Send] = []
        for send in sent:
            if send.to in self.nodes:
                others += self.tell(send.to, send.message, sender=sender)
            else:
                others.append(send)
        return others


def replicated(records: int = 6, **limits: float) -> Pair:
    """Two replicas with batches of two records, all ordered."""
    pair = Pair(config_of(**limits))
    pair.open()
    for first in range(0, records, 2):
        pair.tell_both(AppendBatch(batch(first, [b"%d" % first, b"%d" % (first + 1)])))
    if records:
        pair.tell_both(entries({SHARD: records}), sender=PRIMARY)
    return pair


def all_of(machine: Machine, records: int) -> list[tuple[int, bytes]]:
    return [found for seqnum in range(records) for found in data_of(read(machine, seqnum))]


def expected(records: int) -> list[tuple[int, bytes]]:
    return [(number, b"%d" % number) for number in range(records)]


def shard_of(*batches: tuple[LocalId, LocalId]) -> Shard:
    shard = Shard(ShardId(0), leading=True)
    shard.begin(E1)
    for first, end in batches:
        shard.store(first, end, Location(1, 100 * first + 32, 10), E1)
    return shard
