"""Calls that are offered to other compute nodes: each runs at most once, whatever the node does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from indilog.base.errors import CallOutcomeUnknownError
from indilog_compute.gateway.forwarding import forwarder as forwarder_module
from indilog_compute.gateway.forwarding import peers as peers_module
from indilog_compute.gateway.forwarding.connections import IDLE_MAX
from tests.unit.compute.gateway.forwarding.fake_peer import (
    Behaviour,
    Cluster,
    Exchange,
    FakePeer,
    forwarded,
)

pytestmark = pytest.mark.asyncio


async def test_a_node_that_takes_a_call_gets_its_body_and_its_answer_is_returned(
    tmp_path: Path,
) -> None:
    cluster, peer = Cluster(tmp_path), FakePeer()
    async with cluster.joined(peer):
        answer = await cluster.forwarder.forward(forwarded(b'{"n": 1}', key="k"))
        assert answer is not None
        assert (answer.status, answer.body, peer.bodies) == (200, b"1", [b'{"n": 1}'])
        lines = peer.heads[0].split(b"\r\n")
        assert lines[0] == b"POST /functions/shop/buy HTTP/1.1"
        assert {b"expect: 100-continue", b"indilog-forwarded: 7", b"idempotency-key: k"} <= (
            set(lines)
        )


@pytest.mark.parametrize("body", [b"", b"x" * 3_000_000], ids=["empty", "large"])
async def test_a_body_of_any_size_arrives(tmp_path: Path, body: bytes) -> None:
    cluster, peer = Cluster(tmp_path), FakePeer()
    async with cluster.joined(peer):
        assert await cluster.forwarder.forward(forwarded(body)) is not None
        assert peer.bodies == [body]


async def test_a_continue_that_comes_twice_is_not_an_answer(tmp_path: Path) -> None:
    async def twice(exchange: Exchange) -> None:
        await exchange.take()
        exchange.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        exchange.answer(body=b"2")

    cluster = Cluster(tmp_path)
    async with cluster.joined(FakePeer(twice)):
        answer = await cluster.forwarder.forward(forwarded())
        assert answer is not None
        assert (answer.status, answer.body) == (200, b"2")


async def test_calls_after_each_other_share_a_connection(tmp_path: Path) -> None:
    cluster, peer = Cluster(tmp_path), FakePeer()
    async with cluster.joined(peer):
        for _ in range(5):
            assert await cluster.forwarder.forward(forwarded()) is not None
        assert (peer.connections, len(peer.bodies)) == (1, 5)


async def test_a_node_that_refuses_gets_no_body_and_another_one_is_asked(tmp_path: Path) -> None:
    cluster, full, free = Cluster(tmp_path), FakePeer(), FakePeer()
    full.behaviour = full.refuse
    async with cluster.joined(full), cluster.joined(free):
        assert await cluster.forwarder.forward(forwarded()) is not None
        assert (len(full.heads), full.bodies, free.bodies) == (1, [], [b"{}"])
        assert cluster.counters.calls_forwarded_refused == 1


async def test_at_most_two_nodes_are_asked(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    peers = [FakePeer() for _ in range(3)]
    for peer in peers:
        peer.behaviour = peer.refuse
    async with cluster.joined(peers[0]), cluster.joined(peers[1]), cluster.joined(peers[2]):
        assert await cluster.forwarder.forward(forwarded()) is None
        assert sum(len(peer.heads) for peer in peers) == 2


async def test_a_node_is_not_asked_again_while_it_is_known_to_be_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "LOAD_KEPT_S", 600.0)
    cluster, peer = Cluster(tmp_path), FakePeer()
    peer.behaviour = peer.refuse
    async with cluster.joined(peer):
        for _ in range(3):
            assert await cluster.forwarder.forward(forwarded()) is None
        assert len(peer.heads) == 1


async def test_without_other_nodes_no_call_is_forwarded(tmp_path: Path) -> None:
    assert await Cluster(tmp_path).forwarder.forward(forwarded()) is None


async def cut(exchange: Exchange) -> None:
    exchange.cut()


async def cut_after_body(exchange: Exchange) -> None:
    await exchange.take()
    exchange.cut()


async def garbage_after_body(exchange: Exchange) -> None:
    await exchange.take()
    exchange.send(b"\x00\x01 this is not HTTP\r\n\r\n")


async def too_large(exchange: Exchange) -> None:
    await exchange.take()
    exchange.answer(body=b"x" * 1001)


async def silent_after_body(exchange: Exchange) -> None:
    await exchange.take()


async def silent(exchange: Exchange) -> None:
    pass


async def garbage(exchange: Exchange) -> None:
    exchange.send(b"hello?\r\n\r\n")


async def stops(exchange: Exchange) -> None:
    exchange.answer(503, retry_after="1")


@pytest.mark.parametrize("behaviour", [cut, garbage, silent, stops])
async def test_a_node_that_fails_before_it_takes_a_call_is_not_asked_for_a_second(
    tmp_path: Path, behaviour: Behaviour, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "UNREACHABLE_S", 600.0)
    cluster, failing, other = Cluster(tmp_path), FakePeer(), FakePeer()

    async def fails(exchange: Exchange) -> None:
        monkeypatch.setattr(forwarder_module, "OFFER_S", 60.0)  # the other one has time
        await behaviour(exchange)

    failing.behaviour = fails
    if behaviour is silent:
        monkeypatch.setattr(forwarder_module, "OFFER_S", 0.5)
    async with cluster.joined(failing), cluster.joined(other):
        for _ in range(3):
            assert await cluster.forwarder.forward(forwarded()) is not None
        assert (len(failing.heads), len(other.bodies)) == (1, 3)
        assert cluster.counters.calls_forwarded_lost == 0


async def test_a_node_without_a_socket_costs_no_call(tmp_path: Path) -> None:
    cluster, other = Cluster(tmp_path), FakePeer()
    async with cluster.joined(FakePeer()) as gone, cluster.joined(other):
        cluster.socket_of(gone).unlink()
        assert await cluster.forwarder.forward(forwarded()) is not None
        assert other.bodies == [b"{}"]


@pytest.mark.parametrize(
    "behaviour", [cut_after_body, garbage_after_body, too_large, silent_after_body]
)
async def test_a_call_that_a_lost_node_had_taken_has_an_unknown_outcome_and_is_not_repeated(
    tmp_path: Path, behaviour: Behaviour
) -> None:
    cluster, failing, other = Cluster(tmp_path), FakePeer(behaviour), FakePeer()
    async with cluster.joined(failing), cluster.joined(other):
        with pytest.raises(
            CallOutcomeUnknownError, match=r"engine-1 was lost while it ran shop\.buy"
        ):
            await cluster.forwarder.forward(forwarded(answer_s=0.05))
        assert other.heads == []
        assert cluster.counters.calls_forwarded_lost == 1


async def test_a_call_with_a_key_whose_node_is_lost_may_be_run_here(tmp_path: Path) -> None:
    cluster, failing, other = Cluster(tmp_path), FakePeer(cut_after_body), FakePeer()
    async with cluster.joined(failing), cluster.joined(other):
        assert await cluster.forwarder.forward(forwarded(key="k")) is None
        assert other.heads == [], "it is repeated here, not forwarded a second time"


async def test_a_call_with_a_key_that_a_stopping_node_cut_off_may_be_run_here(
    tmp_path: Path,
) -> None:
    async def cut_off(exchange: Exchange) -> None:
        await exchange.take()
        exchange.answer(503, indilog_load="1/1")

    async def failed(exchange: Exchange) -> None:
        await exchange.take()
        exchange.answer(503, indilog_load="1/1", indilog_invocation="i-1")

    cluster, peer = Cluster(tmp_path), FakePeer(cut_off)
    async with cluster.joined(peer):
        assert await cluster.forwarder.forward(forwarded(key="k")) is None
    cluster, peer = Cluster(tmp_path / "f"), FakePeer(failed)
    async with cluster.joined(peer):
        answer = await cluster.forwarder.forward(forwarded(key="k"))
        assert answer is not None
        assert answer.status == 503, "the function failed, and its outcome is kept"


async def test_a_kept_connection_that_ended_meanwhile_costs_no_call(tmp_path: Path) -> None:
    cluster, peer = Cluster(tmp_path), FakePeer()

    async def ends_at_second_offer(exchange: Exchange) -> None:
        if len(peer.heads) == 2:
            exchange.cut()
        else:
            await peer.take_and_answer(exchange)

    peer.behaviour = ends_at_second_offer
    async with cluster.joined(peer):
        for _ in range(2):
            assert await cluster.forwarder.forward(forwarded()) is not None
        assert (peer.connections, len(peer.bodies)) == (2, 2)


async def test_a_call_that_began_here_while_it_was_offered_is_not_sent(tmp_path: Path) -> None:
    cluster, peer = Cluster(tmp_path), FakePeer()
    async with cluster.joined(peer):
        call = forwarded()
        assert await cluster.forwarder.forward(call, lambda: False) is None
        assert (call.is_taken, len(peer.heads), peer.bodies) == (False, 1, [])
        assert await cluster.forwarder.forward(forwarded()) is not None
        assert peer.connections == 2, "the first one waits for a body"


async def test_a_call_that_a_node_took_and_did_not_begin_may_be_run_here(tmp_path: Path) -> None:
    async def refuses_late(exchange: Exchange) -> None:
        await exchange.take()
        exchange.answer(503, indilog_refused="1", indilog_load="1/1")

    cluster = Cluster(tmp_path)
    async with cluster.joined(FakePeer(refuses_late)):
        call = forwarded()
        assert await cluster.forwarder.forward(call) is None
        assert (call.is_taken, call.may_have_run) == (True, False)


async def test_the_calls_that_are_forwarded_at_a_time_are_limited(tmp_path: Path) -> None:
    released = asyncio.Event()
    taken = asyncio.Queue[None]()

    async def waits(exchange: Exchange) -> None:
        await exchange.take()
        taken.put_nowait(None)
        await released.wait()
        exchange.answer()

    cluster = Cluster(tmp_path, calls_max=2)
    async with cluster.joined(FakePeer(waits)):
        running = [asyncio.create_task(cluster.forwarder.forward(forwarded())) for _ in range(2)]
        for _ in running:
            await taken.get()
        assert await cluster.forwarder.forward(forwarded()) is None
        released.set()
        assert None not in await asyncio.gather(*running)
        assert await cluster.forwarder.forward(forwarded()) is not None


async def test_a_cancelled_call_ends_its_connection_and_frees_its_place(tmp_path: Path) -> None:
    taken, ended = asyncio.Event(), asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        await exchange.take()
        taken.set()
        await exchange.until_ended()
        ended.set()

    cluster, peer = Cluster(tmp_path, calls_max=1), FakePeer(waits)
    async with cluster.joined(peer):
        running = asyncio.create_task(cluster.forwarder.forward(forwarded()))
        await taken.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await ended.wait()
        peer.behaviour = peer.take_and_answer
        assert await cluster.forwarder.forward(forwarded()) is not None


async def test_few_unused_connections_are_kept(tmp_path: Path) -> None:
    cluster, peer = Cluster(tmp_path, calls_max=100), FakePeer()
    count = IDLE_MAX + 5
    there = asyncio.Barrier(count)

    async def together(exchange: Exchange) -> None:
        await exchange.take()
        await there.wait()
        exchange.answer()

    peer.behaviour = together
    async with cluster.joined(peer):
        for again in (1, 2):
            await asyncio.gather(*[cluster.forwarder.forward(forwarded()) for _ in range(count)])
            assert peer.connections == count + (again - 1) * (count - IDLE_MAX)


class Waiting:
    """Calls that wait for a slot here."""

    def __init__(self, cluster: Cluster, count: int) -> None:
        self.queued = set(range(count))
        self._cluster = cluster
        self.calls = [forwarded(b"%d" % n) for n in range(count)]
        self.tasks = [asyncio.create_task(self._wait(n)) for n in range(count)]

    async def _wait(self, n: int) -> object:
        return await self._cluster.forwarder.forward_waiting(
            self.calls[n], is_waiting=lambda: n in self.queued, withdraw=lambda: self.withdraw(n)
        )

    def withdraw(self, n: int) -> bool:
        was_there = n in self.queued
        self.queued.discard(n)
        return was_there


async def test_waiting_calls_continue_one_by_one_in_their_order_as_a_node_gets_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarder_module, "AGAIN_S", 600.0)
    peer, slots = FakePeer(), asyncio.Semaphore(1)

    async def one_slot(exchange: Exchange) -> None:
        if slots.locked():
            await peer.refuse(exchange)
            return
        async with slots:
            peer.bodies.append(await exchange.take())
            await asyncio.sleep(0.01)
        exchange.answer(indilog_load="0/1")

    peer.behaviour = one_slot
    cluster = Cluster(tmp_path)
    async with cluster.joined(peer):
        waiting = Waiting(cluster, 6)
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*waiting.tasks)
        assert None not in answers
        assert peer.bodies == [b"0", b"1", b"2", b"3", b"4", b"5"]


async def test_a_waiting_call_is_not_overtaken_while_it_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node gets room after it has refused a call, and before that call hears of it."""
    monkeypatch.setattr(forwarder_module, "AGAIN_S", 600.0)
    monkeypatch.setattr(peers_module, "LOAD_KEPT_S", 0.0)
    peer, may_answer, may_refuse = FakePeer(), asyncio.Event(), asyncio.Event()

    async def busy_and_slow(exchange: Exchange) -> None:
        if len(peer.heads) == 1:
            peer.bodies.append(await exchange.take())
            await may_answer.wait()
            exchange.answer(indilog_load="0/1")
        elif len(peer.heads) == 2:
            may_answer.set()
            await may_refuse.wait()
            await peer.refuse(exchange)
        else:
            await peer.take_and_answer(exchange)

    peer.behaviour = busy_and_slow
    cluster = Cluster(tmp_path)
    async with cluster.joined(peer):
        waiting = Waiting(cluster, 3)
        async with asyncio.timeout(60):
            assert await waiting.tasks[0] is not None
            may_refuse.set()
            assert None not in await asyncio.gather(*waiting.tasks)
        assert peer.bodies == [b"0", b"1", b"2"]


async def test_a_call_that_begins_here_is_no_longer_offered_and_the_next_one_is(
    tmp_path: Path,
) -> None:
    cluster, peer = Cluster(tmp_path), FakePeer()
    peer.behaviour = peer.refuse
    async with cluster.joined(peer):
        waiting = Waiting(cluster, 3)
        await peer.asked.wait()
        waiting.withdraw(0)
        peer.behaviour = peer.take_and_answer
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*waiting.tasks)
        assert [answer is None for answer in answers] == [True, False, False]
        assert peer.bodies == [b"1", b"2"]


async def test_a_call_that_begins_here_while_a_node_takes_it_is_offered_to_no_other_node(
    tmp_path: Path,
) -> None:
    cluster, peers = Cluster(tmp_path), [FakePeer(), FakePeer()]
    async with cluster.joined(peers[0]), cluster.joined(peers[1]), asyncio.timeout(60):
        assert await cluster.forwarder.forward(forwarded(), lambda: False) is None
        assert sum(len(peer.heads) for peer in peers) == 1
        assert [peer.bodies for peer in peers] == [[], []]


async def test_a_waiting_call_is_offered_to_a_node_that_joins(tmp_path: Path) -> None:
    cluster, peer = Cluster(tmp_path), FakePeer()
    waiting = Waiting(cluster, 1)
    await asyncio.sleep(0)
    async with cluster.joined(peer), asyncio.timeout(60):
        assert await waiting.tasks[0] is not None


async def test_a_waiting_call_whose_client_leaves_is_forgotten(tmp_path: Path) -> None:
    cluster, peer = Cluster(tmp_path), FakePeer()
    peer.behaviour = peer.refuse
    async with cluster.joined(peer):
        waiting = Waiting(cluster, 3)
        await peer.asked.wait()
        for left in (0, 1):
            waiting.tasks[left].cancel()
        peer.behaviour = peer.take_and_answer
        async with asyncio.timeout(60):
            assert await waiting.tasks[2] is not None
        assert peer.bodies == [b"2"]
