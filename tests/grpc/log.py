"""A `Log` over the gRPC interface, for the contract suite."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, TypeAlias

import httpx

import grpc
from indilog.base.errors import (
    ConditionFailedError,
    DataLossError,
    IndilogError,
    TooLargeError,
    TrimmedError,
)
from indilog.base.ids import MAX_SEQNUM, SeqNum, UserTag, tag_columns
from indilog.base.log import (
    After,
    Entry,
    Log,
    Record,
    Session,
    check_after,
    check_bound,
    check_limit,
    check_log_name,
    check_record,
    check_time,
    check_wait,
)
from indilog.base.retention import Retention, checked_retention
from indilog.config import ClusterConfig
from indilog.link.access import reach
from indilog_compute.gateway.problems import STATUSES
from indilog_compute.gateway.rpc import indilog_v1_pb2 as pb
from indilog_compute.gateway.rpc.messages import retention_from, tag_to, tags_from
from indilog_compute.gateway.rpc.status import PROBLEM

_KINDS = {kind.__name__: kind for kind in STATUSES}
_WAIT_S_MAX = 300.0
Message: TypeAlias = Any
"""A message of the interface, or its class."""


def grpc_address(url: str) -> tuple[str, str]:
    """Return the address of the gRPC server of the platform at `url`, and its token."""
    endpoint = reach(url)
    with httpx.Client(**endpoint.for_httpx) as client:
        port = client.get("/status").raise_for_status().json()["gateway"]["grpc_port"]
    return f"127.0.0.1:{port}", endpoint.token


class GrpcLogs:
    """Logs of a platform over one channel.

    Attributes:
        scope: shared by all its logs (`Log.scope`).
    """

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {token}"),)
        self.scope: object = self  # libraries keep weak references to it

    def log(self, name: str, session: Session) -> GrpcLog:
        return GrpcLog(self, check_log_name(name), session)

    async def ask(self, method: str, request: Message, answer: Message) -> Message:
        call = self._channel.unary_unary(
            f"/indilog.v1.LogService/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            return await call(request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error

    def stream(self, request: pb.SubscribeRequest) -> Message:
        call = self._channel.unary_stream(
            "/indilog.v1.LogService/Subscribe",
            request_serializer=pb.SubscribeRequest.SerializeToString,
            response_deserializer=pb.SubscribeResponse.FromString,
        )
        return call(request, metadata=self._metadata)


def error_of(error: grpc.aio.AioRpcError) -> Exception:
    """Return the platform's error that a status describes."""
    found = dict(error.trailing_metadata() or ()).get(PROBLEM)
    if found is None:
        return error
    details = json.loads(found)
    kind = _KINDS.get(details["title"], IndilogError)
    raised = kind.__new__(kind)
    raised.args = (details["detail"],)
    if isinstance(raised, TrimmedError):
        raised.first_seqnum = details["next_seqnum"]
    if isinstance(raised, DataLossError):
        raised.seqnum, raised.next_seqnum = details.get("seqnum"), details.get("next_seqnum")
        raised.tags = []
    if isinstance(raised, ConditionFailedError):
        raised.last_seqnum = details.get("last_seqnum")
    return raised


class GrpcLog(Log):
    """One log in one session."""

    def __init__(self, logs: GrpcLogs, name: str, session: Session) -> None:
        self.name = name
        self._logs = logs
        self._session = session
        self._limits = ClusterConfig()

    @property
    def scope(self) -> object:
        return self._logs.scope

    async def _ask(self, method: str, request: Message, answer: Message) -> Message:
        request.log, request.position = self.name, self._session.position
        found = await self._logs.ask(method, request, answer)
        self._session.saw(found.position)
        return found

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        tags = self._checked(data, tags)
        request = pb.AppendRequest(data=data, tags=map(tag_to, tags))
        seqnum: SeqNum = (await self._ask("Append", request, pb.AppendResponse)).seqnum
        return seqnum

    def _checked(self, data: bytes, tags: Iterable[UserTag]) -> tuple[UserTag, ...]:
        given = tags if isinstance(tags, str) else tuple(tags)
        check_record(
            data,
            given,
            bytes_max=self._limits.record_bytes_max,
            tags_max=self._limits.record_tags_max,
        )
        checked = tuple(given)
        tag_columns(self.name, checked)  # refuses what no message could carry
        return checked

    async def append_batch(
        self, entries: Sequence[Entry], *, after: After | None = None
    ) -> list[SeqNum]:
        if not entries and after is None:
            return []
        messages = [
            pb.Entry(data=e.data, tags=map(tag_to, self._checked(e.data, e.tags))) for e in entries
        ]
        condition = None
        if after is not None:
            after = check_after(self.name, after, entries)
            condition = pb.After(tag=tag_to(after.tag), seqnum=after.seqnum)
        request = pb.AppendBatchRequest(entries=messages, after=condition)
        return list((await self._ask("AppendBatch", request, pb.AppendBatchResponse)).seqnums)

    async def read(self, seqnum: SeqNum, *, fresh: bool = False) -> Record | None:
        if check_bound(seqnum) < seqnum:
            return None
        request = pb.ReadRequest(seqnum=seqnum, fresh=fresh)
        return self._found(await self._ask("Read", request, pb.ReadResponse))

    async def read_next(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        wait: float | None = None,
        fresh: bool = False,
    ) -> Record | None:
        request = pb.ReadNextRequest(
            tag=self._tag(tag), bound=check_bound(bound), wait=_wait(wait), fresh=fresh
        )
        return self._found(await self._ask("ReadNext", request, pb.ReadResponse))

    async def read_prev(
        self, tag: UserTag | None = None, bound: SeqNum = MAX_SEQNUM, *, fresh: bool = False
    ) -> Record | None:
        request = pb.ReadPrevRequest(tag=self._tag(tag), bound=check_bound(bound), fresh=fresh)
        return self._found(await self._ask("ReadPrev", request, pb.ReadResponse))

    async def read_range(
        self,
        tag: UserTag | None = None,
        bound: SeqNum = 0,
        *,
        limit: int = 1000,
        wait: float | None = None,
        fresh: bool = False,
    ) -> list[Record]:
        check_limit(limit)
        request = pb.ReadRangeRequest(
            tag=self._tag(tag), bound=check_bound(bound), limit=limit, wait=_wait(wait), fresh=fresh
        )
        answer = await self._ask("ReadRange", request, pb.ReadRangeResponse)
        return [self._record(record) for record in answer.records]

    async def subscribe(
        self, tag: UserTag | None = None, bound: SeqNum = 0
    ) -> AsyncIterator[Record]:
        request = pb.SubscribeRequest(
            log=self.name, position=self._session.position, tag=self._tag(tag), bound=bound
        )
        call = self._logs.stream(request)
        try:
            async for page in call:
                for record in page.records:
                    yield self._record(record)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error
        finally:
            call.cancel()

    async def tail(self) -> SeqNum:
        tail: SeqNum = (await self._ask("Tail", pb.TailRequest(), pb.TailResponse)).tail
        return tail

    async def now(self) -> float:
        time: float = (await self._ask("Now", pb.NowRequest(), pb.NowResponse)).time
        return time

    async def find_time(self, time: float) -> SeqNum:
        check_time(time)
        request = pb.FindTimeRequest(time=float(time))
        seqnum: SeqNum = (await self._ask("FindTime", request, pb.FindTimeResponse)).seqnum
        return seqnum

    async def trim(self, until: SeqNum, *, tag: UserTag | None = None) -> None:
        request = pb.TrimRequest(until=check_bound(until), tag=self._tag(tag))
        await self._ask("Trim", request, pb.TrimResponse)

    async def set_retention(
        self, *, age_s: float | None = None, size_bytes: int | None = None
    ) -> None:
        policy = checked_retention(self.name, age_s, size_bytes)
        message = pb.Retention(age_seconds=policy.age_s, size_bytes=policy.size_bytes)
        await self._ask(
            "SetRetention", pb.SetRetentionRequest(retention=message), pb.SetRetentionResponse
        )

    async def retention(self) -> Retention:
        answer = await self._ask("GetRetention", pb.GetRetentionRequest(), pb.GetRetentionResponse)
        return retention_from(answer.retention)

    async def set_aux(self, seqnum: SeqNum, aux: bytes) -> None:
        check_bound(seqnum)
        if not isinstance(aux, bytes):
            raise TypeError(f"Aux data must be bytes, not {type(aux).__name__}; encode it first.")
        if len(aux) > self._limits.aux_bytes_max:
            raise TooLargeError(
                "The aux data's size in bytes", size=len(aux), limit=self._limits.aux_bytes_max
            )
        await self._ask("SetAux", pb.SetAuxRequest(seqnum=seqnum, aux=aux), pb.SetAuxResponse)

    def _tag(self, tag: UserTag | None) -> pb.Tag | None:
        if tag is None:
            return None
        tag_columns(self.name, (tag,))
        return tag_to(tag)

    def _found(self, answer: pb.ReadResponse) -> Record | None:
        return self._record(answer.record) if answer.HasField("record") else None

    def _record(self, record: pb.Record) -> Record:
        names = tag_columns(self.name, tags_from(record.tags)).names
        aux = record.aux if record.HasField("aux") else None
        return Record(record.seqnum, names, record.data, record.time, record.ordered_at, aux)


def _wait(wait: float | None) -> float:
    return min(check_wait(wait), _WAIT_S_MAX)
