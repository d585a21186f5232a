"""Offers calls for which this node has no room to other compute nodes, and returns the answers of
these nodes. `InvokeEndpoint` calls `Forwarder`; `PeerTable` chooses the nodes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from indilog.base.errors import CallOutcomeUnknownError
from indilog.base.ids import NodeId, SeqNum
from indilog_compute.gateway.counters import GatewayCounters
from indilog_compute.gateway.forwarding.connection import (
    PeerAnswer,
    PeerConnection,
    PeerLostError,
)
from indilog_compute.gateway.forwarding.connections import PeerConnections
from indilog_compute.gateway.forwarding.headers import (
    FORWARDED_HEADER,
    INVOCATION_HEADER,
    LOAD_HEADER,
    REFUSED_HEADER,
    NodeLoad,
    load_in,
)
from indilog_compute.gateway.forwarding.peers import Peers, PeerTable

OFFERS_MAX: Final = 2
"""Number of nodes to which a call is offered, one after the other. If all refuse, the call waits on
this node.
"""
OFFER_S: Final = 1.0
"""Seconds within which a node must take or refuse an offered call."""
AGAIN_S: Final = 0.1
"""Seconds until a waiting call is offered again. The pause ends earlier if the answer of a node
shows that it has room.
"""


class ForwardedCall:
    """A call that may run on another compute node.

    Args:
        name: `app.function`.
        target: path and query of the call's request.
        body: the arguments of the call.
        headers: the `name: value` lines of the caller's request that the other node needs.
        key: the idempotency key; empty: the call has none.
        deployed_at: seqnum of the deployment that this node runs.
        answer_s: seconds within which the other node must answer after it has taken the call; None:
            no limit.

    Attributes:
        is_taken: whether another node has taken the call, so that the call no longer waits here.
        may_have_run: whether the call may have run on another node.
    """

    __slots__ = (
        "answer_s", "application", "body", "head", "is_taken", "key", "may_have_run", "name",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        target: bytes,
        body: bytes,
        *,
        headers: bytes,
        key: str,
        deployed_at: SeqNum,
        answer_s: float | None,
    ) -> None:
        self.name = name
        self.application = name.partition(".")[0]
        self.body = body
        self.key = key
        self.answer_s = answer_s
        self.is_taken = self.may_have_run = False
        self.head = (
            b"POST %b HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n"
            b"content-type: application/json\r\ntransfer-encoding: chunked\r\n"
            b"%b: %d\r\n%b\r\n" % (target, FORWARDED_HEADER, deployed_at, headers)
        )


class Forwarder:
    """Forwards calls of one gateway.

    Args:
        peers: the other compute nodes.
        calls_max: largest number of calls that may be offered or forwarded at a time.
        answer_bytes_max: bytes of the largest body of an answer.
        counters: counts forwarded, refused and lost calls.
    """

    def __init__(
        self, peers: Peers, *, calls_max: int, answer_bytes_max: int, counters: GatewayCounters
    ) -> None:
        self._peers = peers
        self._calls_max = calls_max
        self._counters = counters
        self._connections = PeerConnections(peers, answer_bytes_max)
        self._table = PeerTable()
        self._nodes: tuple[NodeId, ...] = ()
        self._in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        """Calls that wait here for their next offer, oldest first."""
        self._is_offering = False
        """Whether a waiting call is being offered; the other calls wait for the end of this offer.
        """
        self._is_offered_again = False
        """Whether the call that is being offered is offered once more if it is refused, because a
        node may have got room.
        """
        self._timer: asyncio.TimerHandle | None = None

    async def forward(
        self, call: ForwardedCall, commit: Callable[[], bool] = lambda: True
    ) -> PeerAnswer | None:
        """Offer a call to other nodes.

        Args:
            call: the call.
            commit: called when a node takes the call, just before the body is sent. If the result
                is False, the body is not sent, and no further node is asked.

        Returns:
            The answer of the node that took the call. None: the call may run on this node. In this
                case no other node took and began the call, or the call has a key and its node was
                lost or stops.

        Raises:
            CallOutcomeUnknownError: a node took the call, and was lost or did not answer in time.
        """
        asked: set[NodeId] = set()
        is_wanted = True

        def commit_here() -> bool:
            nonlocal is_wanted
            is_wanted = commit()
            return is_wanted

        while len(asked) < OFFERS_MAX and is_wanted and not call.is_taken:
            if (node := self._choose(call, asked)) is None:
                return None
            asked.add(node)
            self._in_flight += 1
            self._table.sent(node)
            try:
                answer = await self._offer(node, call, commit_here)
            finally:
                self._in_flight -= 1
                self._table.ended(node)
            if answer is not None:
                return answer
        return None

    async def forward_waiting(
        self,
        call: ForwardedCall,
        *,
        is_waiting: Callable[[], bool],
        withdraw: Callable[[], bool],
    ) -> PeerAnswer | None:
        """Offer a call that waits for a slot here, until another node takes it or this node begins
        it. The call keeps its place in the queue of this node until another node takes it.

        Args:
            call: the call.
            is_waiting: returns whether the call waits for a slot here.
            withdraw: removes the call from the queue of this node. The result is False if the call
                has begun or ended here.

        Returns:
            The answer of the node that took the call. None: if `call.is_taken`, the call was
            withdrawn and must be submitted here again; otherwise the call has begun or ended here.

        Raises:
            CallOutcomeUnknownError: see `forward`.
        """
        is_first = True

        def commit() -> bool:
            self._is_offering = False
            return withdraw()

        while is_waiting():
            if self._waiting or self._is_offering or not is_first:
                await self._wait(is_first=is_first)
            is_first = False
            if not is_waiting():
                self._wake_one()
                return None
            self._is_offering, self._is_offered_again = True, False
            try:
                answer = await self.forward(call, commit)
            finally:
                if not call.is_taken:
                    self._is_offering = False
            if call.is_taken:
                return answer
        return None

    def close(self) -> None:
        """Close all connections that carry no call."""
        self._connections.close()
        if self._timer is not None:
            self._timer.cancel()

    # --- internal

    def _choose(self, call: ForwardedCall, asked: set[NodeId]) -> NodeId | None:
        if self._in_flight >= self._calls_max:
            return None
        nodes = tuple(node for node in self._peers.nodes() if node != self._peers.own)
        if nodes != self._nodes:
            self._nodes = nodes
            self._table.set_nodes(nodes)
            self._connections.keep_only(nodes)
        return self._table.choose(call.application, _now(), without=asked)

    async def _offer(
        self, node: NodeId, call: ForwardedCall, commit: Callable[[], bool]
    ) -> PeerAnswer | None:
        """Offer a call to one node, and return the answer of the node.

        None: the node did not take or did not begin the call, or `commit` returned False, or the
        call has a key and the node was lost or stops.
        """
        try:
            answer = await self._run_at(node, call, commit)
        except (OSError, PeerLostError, TimeoutError):
            self._table.unreachable(node, _now())
            self._check_lost(node, call)
            return None
        if answer is None:
            return None
        if answer.value(REFUSED_HEADER) is not None:
            self._refused(node, call, answer)
            call.may_have_run = False
            return None
        if call.key and _was_cut_off(answer):
            self._table.unreachable(node, _now())
            return None
        if (load := _load_of(answer)) is not None:
            self._table.answered(node, load, _now())
            if load.has_room:
                self._wake_one()
        return answer

    async def _run_at(
        self, node: NodeId, call: ForwardedCall, commit: Callable[[], bool]
    ) -> PeerAnswer | None:
        """Offer a call to one node, send its body, and return the answer; None: the body was not
        sent.

        Raises:
            OSError, PeerLostError, TimeoutError: the node was lost, or did not answer in time.
        """
        connection, refusal = await self._await_consent(node, call)
        is_whole = False
        try:
            if refusal is not None:
                self._refused(node, call, refusal)
                return None
            if not commit():
                return None
            call.is_taken = call.may_have_run = True
            self._counters.calls_forwarded += 1
            self._wake_one()  # the node may have room for another call
            async with asyncio.timeout(call.answer_s):
                answer = await connection.run(call.body)
            is_whole = True
            return answer
        finally:
            if not is_whole:
                connection.close()
            self._connections.release(node, connection)

    async def _await_consent(
        self, node: NodeId, call: ForwardedCall
    ) -> tuple[PeerConnection, PeerAnswer | None]:
        """Return a connection on which the node waits for the body of `call`, or the refusal."""
        async with asyncio.timeout(OFFER_S):
            while True:
                connection, is_kept = await self._connections.take(node)
                try:
                    return connection, await connection.offer(call.head)
                except PeerLostError:
                    if not is_kept:
                        raise
                except BaseException:
                    connection.close()
                    raise

    def _check_lost(self, node: NodeId, call: ForwardedCall) -> None:
        """Raise the error for a call that may have run on a lost node, unless it has a key."""
        if not call.may_have_run:
            return
        self._counters.calls_forwarded_lost += 1
        if not call.key:
            raise CallOutcomeUnknownError(
                f"The compute node {node} was lost while it ran {call.name}; the call may have had "
                "effects."
            )

    def _refused(self, node: NodeId, call: ForwardedCall, answer: PeerAnswer) -> None:
        self._counters.calls_forwarded_refused += 1
        load = _load_of(answer)
        self._table.refused(node, call.application, load, _now())
        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE and load is None:
            self._table.unreachable(node, _now())  # the node stops, or has too many connections

    async def _wait(self, *, is_first: bool) -> None:
        """Wait until the call may be offered: a node may have room, or `AGAIN_S` have passed."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if is_first:
            self._waiting.append(waiter)
        else:
            self._waiting.appendleft(waiter)
        if self._is_offered_again and not self._is_offering:
            self._is_offered_again = False
            self._wake_next()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(AGAIN_S, self._on_time)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif waiter.done() and not waiter.cancelled():
                self._wake_one()
            raise

    def _on_time(self) -> None:
        self._timer = None
        self._wake_next()  # even during an offer, because the node that got it may be silent
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(AGAIN_S, self._on_time)

    def _wake_one(self) -> None:
        """Let the first waiting call be offered. If a call is being offered now, offer this call
        once more instead, in case it is refused.
        """
        if self._is_offering:
            self._is_offered_again = True
        else:
            self._wake_next()

    def _wake_next(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return


def _was_cut_off(answer: PeerAnswer) -> bool:
    """Whether a recorded call has no outcome yet, because its node stops or cannot append."""
    return answer.status == HTTPStatus.SERVICE_UNAVAILABLE and (
        answer.value(INVOCATION_HEADER) is None
    )


def _load_of(answer: PeerAnswer) -> NodeLoad | None:
    return load_in(answer.value(LOAD_HEADER) or b"")


def _now() -> float:
    return asyncio.get_running_loop().time()
