"""A gateway that offers calls to other compute nodes, and takes those that they offer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import pytest

from indilog.base.errors import OverloadedError
from indilog.config import Config, node_config
from indilog.link.link_messages import Failed, Returned
from indilog.testing import MemoryLogs
from indilog_compute.gateway import create_gateway
from indilog_compute.gateway.app import GatewayApp
from indilog_compute.positions import Positions
from tests.unit.compute.gateway.forwarding.fake_peer import Cluster, FakePeer
from tests.unit.compute.gateway.forwarding.fake_peer import Exchange as PeerExchange

pytestmark = pytest.mark.asyncio

OFFERED = ((b"indilog-forwarded", b"7"),)


class FakeCall:
    """A call of `shop.buy`."""

    name, invocation = "shop.buy", "i-1"

    def __init__(self, *, runs: bool) -> None:
        self.worker = object() if runs else None
        self.outcome: asyncio.Future[Returned | Failed] = asyncio.get_running_loop().create_future()


class FakeHost:
    """A compute node with some slots; a call that gets one ends only when a test ends it."""

    def __init__(
        self, slots: int, *, deployed_at: int | None = 7, is_overloaded: bool = False
    ) -> None:
        self.slots = slots
        self.calls: list[FakeCall] = []
        self.queued: list[FakeCall] = []
        self.cancelled: list[FakeCall] = []
        self.once: list[str] = []
        self.sent: list[bytes] = []
        self.known: set[str] = set()
        self.recorded_not_started = 0
        self.positions = Positions(MemoryLogs())
        self.change_count = 0
        self._deployed_at = deployed_at
        self.is_overloaded = is_overloaded

    @property
    def load(self) -> tuple[int, int]:
        return len(self.calls), self.slots

    def free_slots(self, name: str) -> int:
        assert name == "shop.buy"
        return max(0, self.slots - len(self.calls))

    def deployed_at(self, name: str) -> int | None:
        assert name == "shop.buy"
        return self._deployed_at

    def longest_s(self, name: str) -> float:
        assert name == "shop.buy"
        return 60.0

    def has_key(self, name: str, arguments: bytes, key: str) -> bool:
        assert (name, arguments) == ("shop.buy", b"{}")
        return key in self.known

    def call(self, *_: object, **__: object) -> FakeCall:
        if self.is_overloaded:
            raise OverloadedError("The queue is full.")
        call = FakeCall(runs=len(self.calls) < self.slots)
        (self.calls if call.worker else self.queued).append(call)
        return call

    def withdraw(self, call: FakeCall) -> bool:
        if call not in self.queued:
            return False
        self.queued.remove(call)
        return True

    def cancel(self, call: FakeCall) -> None:
        self.cancelled.append(call)

    async def call_once(self, *_: object, key: str, **__: object) -> tuple[str, Returned]:
        self.once.append(key)
        return "i-2", Returned(5, b'"here"')

    async def send(self, _: str, arguments: bytes, **__: object) -> str:
        self.sent.append(arguments)
        return "i-3"


class Request:
    """One request to a gateway. Its body comes when the application asks for it, unless the test
    keeps it back.
    """

    def __init__(
        self,
        app: GatewayApp,
        target: str = "/functions/shop/buy",
        headers: tuple[tuple[bytes, bytes], ...] = (),
        *,
        body: bytes | None = b"{}",
    ) -> None:
        path, _, query = target.partition("?")
        self.answer: list[MutableMapping[str, Any]] = []
        self.body_asked = asyncio.Event()
        self.body_there = asyncio.Event()
        self.left = asyncio.Event()
        if body is not None:
            self.body_there.set()
        self._is_read = False
        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(),
            "query_string": query.encode(), "headers": headers, "http_version": "1.1",
            "scheme": "http", "root_path": "",
        }  # fmt: skip
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self._is_read:
            self.body_asked.set()
            await self.body_there.wait()
            self._is_read = True
            return {"type": "http.request", "body": b"{}"}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        self.answer.append(message)

    async def ended(self) -> tuple[int, dict[bytes, bytes], Any]:
        """Return status, headers and body of the answer."""
        async with asyncio.timeout(60):
            await self.task
        start, body = self.answer
        return start["status"], dict(start["headers"]), json.loads(body["body"])


def gateway_of(host: FakeHost, directory: Path, cluster: Cluster | None = None) -> GatewayApp:
    config = Config(node=node_config(data_dir=directory, workers=0))
    peers = cluster.peers if cluster is not None else None
    return create_gateway(host, MemoryLogs(config.cluster), dict, config, peers=peers)  # type: ignore[arg-type]


async def turns() -> None:
    """Let everything get as far as it can without time or sockets."""
    for _ in range(50):
        await asyncio.sleep(0)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition that is not announced."""
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


# --- calls that another node offers


async def test_a_node_with_a_free_slot_takes_a_call_and_says_its_load(tmp_path: Path) -> None:
    host = FakeHost(slots=2)
    request = Request(gateway_of(host, tmp_path), headers=OFFERED)
    await turns()
    host.calls[0].outcome.set_result(Returned(3, b'"bought"'))
    status, headers, body = await request.ended()
    assert (status, body, headers[b"indilog-load"]) == (200, "bought", b"1/2")


@pytest.mark.parametrize(
    "host",
    [
        lambda: FakeHost(slots=0),
        lambda: FakeHost(slots=1, deployed_at=6),
        lambda: FakeHost(slots=1, deployed_at=None),
    ],
    ids=["no slot", "an older deployment", "no deployment"],
)
async def test_a_call_that_cannot_start_at_once_is_refused_before_its_body_is_read(
    tmp_path: Path, host: Callable[[], FakeHost]
) -> None:
    made = host()
    request = Request(gateway_of(made, tmp_path), headers=OFFERED, body=None)
    status, headers, body = await request.ended()
    assert (status, body["title"]) == (503, "OverloadedError")
    assert headers[b"indilog-load"] == b"0/%d" % made.slots
    assert not request.body_asked.is_set()
    assert made.calls == made.queued == []


async def test_a_slot_is_reserved_for_a_call_until_its_body_is_there(tmp_path: Path) -> None:
    host = FakeHost(slots=1)
    app = gateway_of(host, tmp_path)
    first = Request(app, headers=OFFERED, body=None)
    await first.body_asked.wait()
    status, headers, _ = await Request(app, headers=OFFERED).ended()
    assert (status, headers[b"indilog-load"]) == (503, b"1/1")
    first.body_there.set()
    await turns()
    assert len(host.calls) == 1
    host.calls[0].outcome.set_result(Returned(3, b"1"))
    await first.ended()


async def test_a_call_whose_slot_was_taken_meanwhile_is_refused_and_leaves_the_queue(
    tmp_path: Path,
) -> None:
    host = FakeHost(slots=1)
    request = Request(gateway_of(host, tmp_path), headers=OFFERED, body=None)
    await request.body_asked.wait()
    host.call()
    request.body_there.set()
    status, headers, _ = await request.ended()
    assert (status, headers[b"indilog-refused"]) == (503, b"1")
    assert host.queued == []


async def test_recorded_calls_that_were_not_started_take_room_from_recorded_calls(
    tmp_path: Path,
) -> None:
    host = FakeHost(slots=1)
    host.recorded_not_started = 1
    app = gateway_of(host, tmp_path)
    with_key = (*OFFERED, (b"idempotency-key", b"k"))
    assert (await Request(app, headers=with_key).ended())[0] == 503
    assert (await Request(app, "/functions/shop/buy?async=1", OFFERED).ended())[0] == 503
    host.recorded_not_started = 0
    assert (await Request(app, headers=with_key).ended())[0] == 200
    assert (await Request(app, "/functions/shop/buy?async=1", OFFERED).ended())[0] == 202


@pytest.mark.parametrize("case", ["plain", "overloaded", "with a key", "asynchronous"])
async def test_a_forwarded_call_whose_slot_was_taken_meanwhile_is_not_forwarded_again(
    tmp_path: Path, case: str
) -> None:
    cluster, peer = Cluster(tmp_path), FakePeer()
    async with cluster.joined(peer):
        host = FakeHost(slots=1)
        target = "/functions/shop/buy" + ("?async=1" if case == "asynchronous" else "")
        key = ((b"idempotency-key", b"k"),) if case == "with a key" else ()
        app = gateway_of(host, tmp_path, cluster)
        request = Request(app, target, (*OFFERED, *key), body=None)
        await request.body_asked.wait()
        host.call()
        host.is_overloaded = case == "overloaded"
        request.body_there.set()
        status, headers, _ = await request.ended()
        is_recorded = case in ("with a key", "asynchronous")
        assert (status >= 500, headers.get(b"indilog-refused")) == (
            (False, None) if is_recorded else (True, b"1")
        )
        assert len(host.once) + len(host.sent) == is_recorded
        assert (peer.heads, host.queued) == ([], [])


# --- calls that this node offers


async def test_a_call_without_a_free_slot_runs_on_another_node(tmp_path: Path) -> None:
    cluster, peer = Cluster(tmp_path), FakePeer()

    async def bought(exchange: PeerExchange) -> None:
        peer.bodies.append(await exchange.take())
        exchange.answer(
            body=b'"there"', content_type="application/json", indilog_position="9",
            indilog_invocation="i-9", indilog_load="0/1", x_secret="1",
        )  # fmt: skip

    peer.behaviour = bought
    async with cluster.joined(peer):
        host = FakeHost(slots=0)
        app = gateway_of(host, tmp_path, cluster)
        status, headers, body = await Request(app, headers=((b"indilog-position", b"0"),)).ended()
        assert (status, body, host.queued) == (200, "there", [])
        assert headers == {
            b"content-length": b"7", b"content-type": b"application/json",
            b"indilog-position": b"9", b"indilog-invocation": b"i-9",
        }  # fmt: skip
        assert b"indilog-position: 0\r\n" in peer.heads[0]
        assert app.resources.counters.calls_forwarded == 1


async def test_a_call_with_a_free_slot_runs_here(tmp_path: Path) -> None:
    cluster, peer = Cluster(tmp_path), FakePeer()
    async with cluster.joined(peer):
        host = FakeHost(slots=1)
        app = gateway_of(host, tmp_path, cluster)
        request = Request(app)
        await turns()
        host.calls[0].outcome.set_result(Returned(3, b'"here"'))
        assert (await request.ended())[2] == "here"
        host.calls.clear()
        assert (await Request(app, headers=((b"idempotency-key", b"k"),)).ended())[2] == "here"
        assert (await Request(app, "/functions/shop/buy?async=1").ended())[0] == 202
        assert peer.heads == []


async def test_a_call_that_this_node_has_no_queue_for_runs_on_another_one(tmp_path: Path) -> None:
    cluster, peer = Cluster(tmp_path), FakePeer()
    async with cluster.joined(peer):
        app = gateway_of(FakeHost(slots=0, is_overloaded=True), tmp_path, cluster)
        assert (await Request(app).ended())[0] == 200
        peer.behaviour = peer.refuse
        await Request(app).ended()
        status, _, body = await Request(app).ended()
        assert (status, body["detail"]) == (503, "The queue is full.")


@pytest.mark.parametrize("target", ["", "?async=1"])
async def test_a_recorded_call_without_a_free_slot_is_recorded_by_another_node(
    tmp_path: Path, target: str
) -> None:
    cluster, peer = Cluster(tmp_path), FakePeer()
    async with cluster.joined(peer):
        host = FakeHost(slots=0)
        app = gateway_of(host, tmp_path, cluster)
        key = ((b"idempotency-key", b"k"),)
        assert (await Request(app, f"/functions/shop/buy{target}", key).ended())[2] == 1
        assert (peer.bodies, host.once, host.sent) == ([b"{}"], [], [])
        assert peer.heads[0].startswith(f"POST /functions/shop/buy{target} HTTP".encode())
        assert b"idempotency-key: k\r\n" in peer.heads[0]


async def test_a_delayed_call_and_a_call_with_a_known_key_stay_here(tmp_path: Path) -> None:
    cluster, peer = Cluster(tmp_path), FakePeer()
    async with cluster.joined(peer):
        host = FakeHost(slots=0)
        host.known.add("k")
        app = gateway_of(host, tmp_path, cluster)
        assert (await Request(app, headers=((b"idempotency-key", b"k"),)).ended())[2] == "here"
        assert (await Request(app, "/functions/shop/buy?async=1&delay=5").ended())[0] == 202
        assert (peer.heads, host.once, host.sent) == ([], ["k"], [b"{}"])


async def lost(exchange: PeerExchange) -> None:
    await exchange.take()
    exchange.cut()


async def test_a_call_whose_node_is_lost_is_repeated_here_only_if_it_has_a_key(
    tmp_path: Path,
) -> None:
    cluster, peer = Cluster(tmp_path), FakePeer(lost)
    async with cluster.joined(peer):
        host = FakeHost(slots=0)
        assert (await Request(gateway_of(host, tmp_path, cluster)).ended())[0] == 504
        assert host.queued == []
        with_key = Request(
            gateway_of(host, tmp_path, cluster), headers=((b"idempotency-key", b"k"),)
        )
        assert (await with_key.ended())[2] == "here"
        app = gateway_of(host, tmp_path, cluster)
        assert (await Request(app, "/functions/shop/buy?async=1").ended())[0] == 504
        assert (host.once, host.sent) == (["k"], [])
        app = gateway_of(host, tmp_path, cluster)
        await Request(app, "/functions/shop/buy?async=1", ((b"idempotency-key", b"k"),)).ended()
        assert host.sent == [b"{}"]


async def test_a_call_that_the_other_node_did_not_begin_is_queued_here_again(
    tmp_path: Path,
) -> None:
    async def refuses_late(exchange: PeerExchange) -> None:
        await exchange.take()
        exchange.answer(503, indilog_refused="1", indilog_load="1/1")

    cluster = Cluster(tmp_path)
    async with cluster.joined(FakePeer(refuses_late)):
        host = FakeHost(slots=0)
        app = gateway_of(host, tmp_path, cluster)
        request = Request(app)
        async with asyncio.timeout(60):
            await until(lambda: bool(app.resources.counters.calls_forwarded and host.queued))
        host.queued[0].outcome.set_result(Returned(3, b'"here"'))
        assert (await request.ended())[2] == "here"


async def test_a_platform_that_stops_says_whether_another_node_may_run_the_call(
    tmp_path: Path,
) -> None:
    taken = asyncio.Event()

    async def waits(exchange: PeerExchange) -> None:
        await exchange.take()
        taken.set()

    cluster, peer = Cluster(tmp_path), FakePeer(waits)
    async with cluster.joined(peer):
        for is_overloaded in (False, True):
            taken.clear()
            host = FakeHost(slots=0, is_overloaded=is_overloaded)
            request = Request(gateway_of(host, tmp_path, cluster))
            await taken.wait()
            await asyncio.sleep(0)
            request.task.cancel()
            status, _, body = await request.ended()
            assert (status, body["title"]) == (503, "CallOutcomeUnknownError")
            assert not body["retryable"]
        peer.behaviour = peer.refuse
        app = gateway_of(FakeHost(slots=0), tmp_path, cluster)
        request = Request(app)
        await until(lambda: app.resources.counters.calls_forwarded_refused > 0)
        request.task.cancel()
        status, _, body = await request.ended()
        assert (status, body["title"], body["retryable"]) == (503, "NotReadyError", True)


async def test_a_client_that_leaves_ends_the_wait_for_another_node(tmp_path: Path) -> None:
    taken, ended = asyncio.Event(), asyncio.Event()

    async def waits(exchange: PeerExchange) -> None:
        await exchange.take()
        taken.set()
        await exchange.until_ended()
        ended.set()

    cluster = Cluster(tmp_path)
    async with cluster.joined(FakePeer(waits)), asyncio.timeout(60):
        app = gateway_of(FakeHost(slots=0), tmp_path, cluster)
        request = Request(app)
        await taken.wait()
        request.left.set()
        await request.task
        await ended.wait()
        assert app.resources.counters.clients_left == 1
        assert request.answer == []
