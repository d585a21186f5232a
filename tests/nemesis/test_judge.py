"""The judge finds planted violations: losses, duplicates, half transfers, repeated steps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import indilog.client
from bokistore import Store, ViewCache
from indilog.config import Config, node_config
from indilog.remote_client import RemoteClient
from indilog.testing import MemoryLog, MemoryLogs
from tests.cluster.queues.queue_evidence import Replayed, Reported
from tests.cluster.queues.test_kill_consumers import PUSHED, SAID, STORY
from tests.nemesis.judge import judged_disks, judged_log
from tests.nemesis.load.flow_load import Orders
from tests.nemesis.load.log_load import LOG, scanned
from tests.nemesis.load.queue_load import Mail
from tests.nemesis.load.store_load import LOG as BANK
from tests.nemesis.load.store_load import Bank
from tests.nemesis.recording import Recorder
from tests.serializability.checker import Transaction
from tests.simulation.history import Operation, Seen

# --- the log


class History:
    """Five appends, one of them refused, a read of the last one, and what the log then shows."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.scan = [Seen(n, b"%d" % n, ("t",)) for n in range(4)]
        self.other = list(self.scan)
        self.subscribed = list(self.scan)
        self.stamps = {n: n + 1.5 for n in range(4)}
        for n in range(4):
            self.add("append", entries=((b"%d" % n, ("t",)),), value=[n])
        self.add("append", entries=((b"refused", ("t",)),), outcome="failed")
        self.add("read_prev", tag="t", bound=9, fresh=True, value=(self.scan[3],))

    def add(self, kind: str, **fields: object) -> None:
        n = len(self.operations)
        operation = Operation(n, n, "engine-0", kind, LOG, outcome="ok")
        operation.invoked, operation.returned = 10 * n, 10 * n + 5
        operation.invoked_s, operation.returned_s = n + 1.0, n + 2.0
        operation.position_before, operation.position_after = n, n + 1
        for name, value in fields.items():
            setattr(operation, name, value)
        self.operations.append(operation)

    def judged(self) -> str:
        scans = {"engine-0": self.scan, "engine-1": self.other}
        shown = {"engine-0": self.subscribed}
        return "; ".join(judged_log(self.operations, scans, shown, self.stamps, tail=5))


def lose(history: History) -> None:
    for shown in (history.scan, history.other, history.subscribed):
        del shown[1]


def repeat(history: History) -> None:
    history.scan.append(Seen(4, b"1", ("t",)))
    history.other.append(Seen(4, b"1", ("t",)))


def keep_refused(history: History) -> None:
    history.scan.append(Seen(4, b"refused", ("t",)))


def hide_from_one_gateway(history: History) -> None:
    del history.other[2]


def hide_from_subscription(history: History) -> None:
    del history.subscribed[2]


def read_stale(history: History) -> None:
    history.operations[-1].value = (history.scan[2],)


def give_seqnum_twice(history: History) -> None:
    history.operations[2].value = [1]


def go_back_in_time(history: History) -> None:
    history.stamps[3] = 0.5


def trim(history: History) -> None:
    history.operations[-1] = Operation(5, 5, "engine-0", "read", LOG, bound=2, outcome="trimmed")


def test_a_consistent_history_of_the_log_is_accepted() -> None:
    assert History().judged() == ""


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (lose, "durable"),
        (repeat, "twice"),
        (keep_refused, "failed"),
        (hide_from_one_gateway, "scan"),
        (hide_from_subscription, "subscribe"),
        (read_stale, "read_prev"),
        (give_seqnum_twice, "unique"),
        (go_back_in_time, "time"),
        (trim, "trim"),
    ],
)
def test_a_planted_violation_of_the_log_is_found(
    plant: Callable[[History], None], check: str
) -> None:
    history = History()
    plant(history)
    assert check in history.judged()


def test_a_trimmed_record_of_a_library_is_no_violation() -> None:
    history = History()
    history.add("read", bound=4, outcome="trimmed")
    assert history.judged() == ""


@pytest.mark.asyncio
async def test_disks_that_differ_from_the_scan_or_lack_copies_are_found(tmp_path: Path) -> None:
    config = Config(node=node_config(segment_bytes=8 * 1024 * 1024))
    async with indilog.client.open(tmp_path / "data", config) as client:
        for n in range(3):
            await client.log(LOG).append(b"%d" % n)
        scan, _ = await scanned(cast("RemoteClient", client))
    assert len(scan) == 3
    [copies] = judged_disks(tmp_path / "data", scan)
    assert "fewer than 3 copies" in copies, "there is one replica"
    differs, _ = judged_disks(tmp_path / "data", [*scan[:2], Seen(9, b"none", ())])
    assert "2 records differ" in differs


@pytest.mark.asyncio
async def test_a_trimmed_batch_may_have_fewer_copies(tmp_path: Path) -> None:
    config = Config(node=node_config(segment_bytes=8 * 1024 * 1024))
    async with indilog.client.open(tmp_path / "data", config) as client:
        for n in range(3):
            await client.log(LOG).append(b"%d" % n)
        await client.log(LOG).trim(2)
    [copies] = judged_disks(tmp_path / "data", [Seen(2, b"2", ())])
    assert "1 batches have fewer than 3 copies, from seqnum 2" in copies


# --- transactions


def bank(plant: Callable[[Bank, MemoryLog], None] = lambda *_: None) -> str:
    """Run transfers of three sessions, let `plant` do something, and judge."""
    logs = MemoryLogs()
    log = MemoryLog(BANK, logs=logs)
    client = cast("RemoteClient", SimpleNamespace(log=lambda _: log))
    made = Bank(Recorder())

    async def story() -> list[str]:
        rng = random.Random(1)
        stores = [Store(log, cache=ViewCache()) for _ in range(3)]
        for _ in range(10):
            await asyncio.gather(*(made.transfer(store, rng) for store in stores))
            await made.audit(stores[0])
        plant(made, log)
        await made.audit(stores[0])
        return await made.judged(client)

    return "; ".join(asyncio.run(story()))


def lose_transfer(made: Bank, _: MemoryLog) -> None:
    txn = Transaction(len(made.transactions), 0, "committed", 1, writes={"0:0": [999]})
    made.transactions.append(txn)


def test_consistent_transfers_are_accepted() -> None:
    assert bank() == ""


def test_a_lost_transfer_is_found() -> None:
    assert "lost" in bank(lose_transfer)


def test_half_a_transfer_is_found() -> None:
    def take_some(found: dict[str, dict[str, int]]) -> str:
        made = Bank(Recorder())
        made.check_sum(found, "the end")
        return "; ".join(made.wrong)

    assert take_some({"0:0": {"balance": 5}, "0:1": {"balance": -5}}) == ""
    assert "sum up to 5" in take_some({"0:0": {"balance": 5}, "0:1": {}})


# --- the queue, and workflows


def mail(pushed: dict[int, int], said: bytes = SAID, maybe: frozenset[int] = frozenset()) -> str:
    made, reported = Mail(Recorder()), Reported()
    made.pushed, made.maybe = pushed, set(maybe)
    for line in said.splitlines(keepends=True):
        reported.hear(line)
    made.reported.append(reported)
    return "; ".join(made.contradictions([Replayed(STORY)]))


def test_the_queue_is_judged() -> None:
    assert mail(PUSHED) == ""
    assert "never acknowledged" in mail(PUSHED | {9: 9}), "a lost message"
    assert "not what was pushed" in mail({0: 7}), "an invented message"
    assert mail({0: 7}, maybe=frozenset({8})) == "", "its push had an unknown outcome"
    assert "confirmed twice" in mail(PUSHED, SAID.replace(b"3 1 8", b"3 0 7"))


def test_workflows_are_judged() -> None:
    made, lines = Orders(Recorder()), {}
    for number in (0, 1):
        made.started.append(number)
        made.results[number] = [5, 6, 7, 8]
        lines[number] = [
            f"order-{number} {part} {4 + part if part else 0} {5 + part}" for part in range(4)
        ]
    ran_again = {**lines, 1: [*lines[1], "order-1 2 6 9"]}
    assert made.contradictions(lines) == made.contradictions(ran_again) == []
    assert made.contradictions({**lines, 1: lines[1][:2]}), "a result that no body returned"
    other = {**lines, 1: [*lines[1][:3], "order-1 3 9 8"]}
    assert made.contradictions(other), "a step that got another result than the one before returned"
    made.results[1] = [5, 6, 7]
    assert made.contradictions(lines), "a step that did not run"
    del made.results[1]
    assert made.contradictions(lines) == ["workflow: order 1 has not ended"]
