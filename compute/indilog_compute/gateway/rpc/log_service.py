"""`indilog.v1.LogService`: one gRPC method for each operation of `indilog.Log`.

`GrpcServer` adds the handlers of `LogService`; `messages` converts requests and answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, TypeAlias

import grpc

from indilog.base.errors import InvalidArgumentsError, WrongStateError
from indilog.base.ids import MAX_SEQNUM, UserTag
from indilog.base.log import Log, LogSource, Session, check_log_name
from indilog.base.subscription import pages
from indilog.link.byte_budget import ByteBudget
from indilog_compute.gateway.rpc import indilog_v1_pb2 as pb
from indilog_compute.gateway.rpc.messages import (
    after_from,
    entries_from,
    record_to,
    retention_from,
    retention_to,
    tag_from,
    tags_from,
)
from indilog_compute.gateway.rpc.status import answering
from indilog_compute.local_log import sharded
from indilog_compute.positions import Positions

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
NAME: Final = "indilog.v1.LogService"
WAIT_S_MAX: Final = 300.0
"""Longest wait of a read, in seconds; afterwards the caller may repeat the read."""
_LIMIT: Final = 1000


class LogService:
    """The handlers of the service.

    Args:
        logs: the logs.
        positions: knows which metalog positions exist.
        budget: counts the bytes of requests and pages; if it is used up, these are refused.
    """

    def __init__(self, logs: LogSource, positions: Positions, budget: ByteBudget) -> None:
        self._logs = logs
        self._positions = positions
        self._budget = budget

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the handlers for the server."""
        unary: dict[str, tuple[Callable[..., Any], Any]] = {
            "Append": (self.append, pb.AppendRequest),
            "AppendBatch": (self.append_batch, pb.AppendBatchRequest),
            "LiveShard": (self.live_shard, pb.LiveShardRequest),
            "AppendToShard": (self.append_to_shard, pb.AppendToShardRequest),
            "Read": (self.read, pb.ReadRequest),
            "ReadNext": (self.read_next, pb.ReadNextRequest),
            "ReadPrev": (self.read_prev, pb.ReadPrevRequest),
            "ReadRange": (self.read_range, pb.ReadRangeRequest),
            "Tail": (self.tail, pb.TailRequest),
            "Now": (self.now, pb.NowRequest),
            "FindTime": (self.find_time, pb.FindTimeRequest),
            "Trim": (self.trim, pb.TrimRequest),
            "SetAux": (self.set_aux, pb.SetAuxRequest),
            "SetRetention": (self.set_retention, pb.SetRetentionRequest),
            "GetRetention": (self.get_retention, pb.GetRetentionRequest),
        }
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(
                handler,
                request_deserializer=request.FromString,
                response_serializer=_serialized,
            )
            for name, (handler, request) in unary.items()
        }
        methods["Subscribe"] = grpc.unary_stream_rpc_method_handler(
            self.subscribe,
            request_deserializer=pb.SubscribeRequest.FromString,
            response_serializer=_serialized,
        )
        return grpc.method_handlers_generic_handler(NAME, methods)

    async def append(self, request: pb.AppendRequest, context: Context) -> pb.AppendResponse:
        """Append a record; answer when it is durable."""
        async with answering(context), self._opened(request, context) as (log, session):
            seqnum = await log.append(request.data, tags=tags_from(request.tags))
            return pb.AppendResponse(seqnum=seqnum, position=session.position)

    async def append_batch(
        self, request: pb.AppendBatchRequest, context: Context
    ) -> pb.AppendBatchResponse:
        """Append records atomically, if the condition of the request holds; answer when the records
        are durable.
        """
        async with answering(context), self._opened(request, context) as (log, session):
            after = after_from(request.after) if request.HasField("after") else None
            seqnums = await log.append_batch(entries_from(request.entries), after=after)
            return pb.AppendBatchResponse(seqnums=seqnums, position=session.position)

    async def live_shard(
        self, request: pb.LiveShardRequest, context: Context
    ) -> pb.LiveShardResponse:
        """Return the shard to which this compute node appends; without `shard`: it has none."""
        async with answering(context), self._opened(request, context) as (log, session):
            shard = await sharded(log).shard()
            return pb.LiveShardResponse(shard=shard, position=session.position)

    async def append_to_shard(
        self, request: pb.AppendToShardRequest, context: Context
    ) -> pb.AppendToShardResponse:
        """Append a record, and return its seqnum and its shard (Scalog 2.1, `appendToShard`)."""
        async with answering(context), self._opened(request, context) as (log, session):
            here = await (placed := sharded(log)).shard()
            if request.HasField("shard") and request.shard != here:
                raise WrongStateError(
                    f"This compute node appends to shard {here}, not {request.shard}; nothing was "
                    "appended. Ask LiveShard of each compute node."
                )
            seqnum = await log.append(request.data, tags=tags_from(request.tags))
            span, *_ = await placed.places(seqnum, seqnum + 1)
            return pb.AppendToShardResponse(
                seqnum=seqnum, shard=span.shard, position=session.position
            )

    async def read(self, request: pb.ReadRequest, context: Context) -> pb.ReadResponse:
        """Return the record at a seqnum."""
        async with answering(context), self._opened(request, context) as (log, session):
            record = await log.read(request.seqnum, fresh=request.fresh)
            found = None if record is None else record_to(record)
            return pb.ReadResponse(record=found, position=session.position)

    async def read_next(self, request: pb.ReadNextRequest, context: Context) -> pb.ReadResponse:
        """Return the first record with a tag at or above a bound."""
        async with answering(context), self._opened(request, context) as (log, session):
            record = await log.read_next(
                _tag(request), request.bound, wait=_wait(request.wait), fresh=request.fresh
            )
            found = None if record is None else record_to(record)
            return pb.ReadResponse(record=found, position=session.position)

    async def read_prev(self, request: pb.ReadPrevRequest, context: Context) -> pb.ReadResponse:
        """Return the last record with a tag at or below a bound."""
        async with answering(context), self._opened(request, context) as (log, session):
            bound = request.bound if request.HasField("bound") else MAX_SEQNUM
            record = await log.read_prev(_tag(request), bound, fresh=request.fresh)
            found = None if record is None else record_to(record)
            return pb.ReadResponse(record=found, position=session.position)

    async def read_range(
        self, request: pb.ReadRangeRequest, context: Context
    ) -> pb.ReadRangeResponse:
        """Return a page of records with a tag at or above a bound."""
        async with answering(context), self._opened(request, context) as (log, session):
            records = await log.read_range(
                _tag(request),
                request.bound,
                limit=request.limit or _LIMIT,
                wait=_wait(request.wait),
                fresh=request.fresh,
            )
            return pb.ReadRangeResponse(records=map(record_to, records), position=session.position)

    async def subscribe(
        self, request: pb.SubscribeRequest, context: Context
    ) -> AsyncIterator[pb.SubscribeResponse]:
        """Send the existing records with a tag at or above a bound, then new records as they are
        appended.

        While the client reads a page, the next page is read. So two pages count for a slow client.
        """
        async with answering(context), self._opened(request, context) as (log, _):
            share = self._budget.share()
            try:
                async with contextlib.aclosing(pages(log, _tag(request), request.bound)) as found:
                    async for page in found:
                        share.free()
                        share.take_up_to(2 * sum(len(record.data) for record in page))
                        yield pb.SubscribeResponse(records=map(record_to, page))
            finally:
                share.free()

    async def tail(self, request: pb.TailRequest, context: Context) -> pb.TailResponse:
        """Return the first seqnum not yet written."""
        async with answering(context), self._opened(request, context) as (log, session):
            tail = await log.tail()
            return pb.TailResponse(tail=tail, position=session.position)

    async def now(self, request: pb.NowRequest, context: Context) -> pb.NowResponse:
        """Return the time of the log."""
        async with answering(context), self._opened(request, context) as (log, session):
            time = await log.now()
            return pb.NowResponse(time=time, position=session.position)

    async def find_time(self, request: pb.FindTimeRequest, context: Context) -> pb.FindTimeResponse:
        """Return the first seqnum ordered at a time or later."""
        async with answering(context), self._opened(request, context) as (log, session):
            seqnum = await log.find_time(request.time)
            return pb.FindTimeResponse(seqnum=seqnum, position=session.position)

    async def trim(self, request: pb.TrimRequest, context: Context) -> pb.TrimResponse:
        """Permanently delete the records below a seqnum, of the whole log or of one tag."""
        async with answering(context), self._opened(request, context) as (log, session):
            await log.trim(request.until, tag=_tag(request))
            return pb.TrimResponse(position=session.position)

    async def set_aux(self, request: pb.SetAuxRequest, context: Context) -> pb.SetAuxResponse:
        """Cache bytes with a record."""
        async with answering(context), self._opened(request, context) as (log, session):
            await log.set_aux(request.seqnum, request.aux)
            return pb.SetAuxResponse(position=session.position)

    async def set_retention(
        self, request: pb.SetRetentionRequest, context: Context
    ) -> pb.SetRetentionResponse:
        """Replace the log's retention policy."""
        async with answering(context), self._opened(request, context) as (log, session):
            policy = retention_from(request.retention)
            await log.set_retention(age_s=policy.age_s, size_bytes=policy.size_bytes)
            return pb.SetRetentionResponse(position=session.position)

    async def get_retention(
        self, request: pb.GetRetentionRequest, context: Context
    ) -> pb.GetRetentionResponse:
        """Return the log's retention policy."""
        async with answering(context), self._opened(request, context) as (log, session):
            policy = retention_to(await log.retention())
            return pb.GetRetentionResponse(retention=policy, position=session.position)

    @contextlib.asynccontextmanager
    async def _opened(
        self,
        request: Any,  # noqa: ANN401 - each has these two fields
        _: Context,
    ) -> AsyncIterator[tuple[Log, Session]]:
        """Enter a block that uses the log and the session of a request. The bytes of the request
        count in the budget until the block ends.

        Raises:
            InvalidTagError: the name of the log is invalid.
            InvalidArgumentsError: the session's position does not exist.
            OverloadedError: the budget is used up.
        """
        name, position = check_log_name(request.log), request.position
        if not self._positions.is_known(position) and (
            fault := await self._positions.fault(position)
        ):
            raise InvalidArgumentsError(
                f"Nothing was done: `position` {fault}", [{"field": "position", "problem": fault}]
            )
        share = self._budget.share()
        try:
            share.take_up_to(request.ByteSize())
            session = Session(position)
            yield self._logs.log(name, session), session
        finally:
            share.free()


def _serialized(message: Any) -> bytes:  # noqa: ANN401 - any message of the interface
    encoded: bytes = message.SerializeToString()
    return encoded


def _tag(request: Any) -> UserTag | None:  # noqa: ANN401 - each has this field
    return tag_from(request.tag) if request.HasField("tag") else None


def _wait(seconds: float) -> float | None:
    """Return how many seconds a read waits; None: it does not wait.

    Raises:
        ValueError: the time is not 0 to 300 seconds.
    """
    if not 0 <= seconds <= WAIT_S_MAX:
        raise ValueError(f"wait must be 0 to {WAIT_S_MAX:.0f} seconds, not {seconds!r:.40}.")
    return seconds or None
