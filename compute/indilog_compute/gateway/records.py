"""The routes of a log: append, read, tail, time, trim, retention, stream.

`LogRoutes` calls `Log`; `values` converts the records. `app.create_gateway` adds the routes.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
import pydantic
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from indilog.base.errors import OverloadedError, TrimmedError
from indilog.base.ids import MAX_SEQNUM, UserTag
from indilog.base.log import (
    READ_RANGE_LIMIT_MAX,
    Log,
    LogSource,
    Record,
    Session,
    check_log_name,
)
from indilog.base.subscription import pages
from indilog.link.byte_budget import ByteShare
from indilog_compute.gateway.clients import SHARE, cancel_if_left
from indilog_compute.gateway.page_text import PageText, RecordLimits
from indilog_compute.gateway.problems import MEDIA_TYPE, problem, problem_text
from indilog_compute.gateway.requests import (
    SMALL_BYTES_MAX,
    body_of,
    check_query,
    decode_json,
    parse_json,
)
from indilog_compute.gateway.values import (
    AppendBody,
    AppendIn,
    RetentionIn,
    TrimIn,
    check_count,
    record_out,
    tag_of,
)

WAIT_S_MAX: Final = 300.0
"""Longest wait of a read, in seconds; afterwards the caller may repeat the read."""
_STREAM_ALIVE_S: Final = 15.0
"""Seconds after which an idle stream sends a keep-alive comment."""
_OCTETS: Final = "application/octet-stream"

Position = Annotated[int, Header(alias="Indilog-Position", ge=0)]
LastEventId = Annotated[int | None, Header(alias="Last-Event-ID", ge=0, lt=MAX_SEQNUM)]
Tag = Annotated[str | None, Query(description="A text tag; without a tag: all records of the log.")]
TagInt = Annotated[int | None, Query(description="An integer tag, instead of `tag`.")]
Since = Annotated[
    datetime | None,
    Query(description="Records ordered at this time or later (ISO 8601 or Unix seconds)."),
]
Fresh = Annotated[
    bool, Query(description="See all records that any caller appended before this request.")
]
Bound = Annotated[int | None, Query(ge=0, le=MAX_SEQNUM, description="Inclusive.")]


class JsonText(Response):
    """A response whose body is already encoded JSON."""

    media_type = "application/json"


def _json(value: object, session: Session, status: HTTPStatus = HTTPStatus.OK) -> Response:
    headers = {"indilog-position": str(session.position)}
    return JsonText(msgspec.json.encode(value), status_code=int(status), headers=headers)


def records_router(logs: LogSource, limits: RecordLimits, *, body_bytes_max: int) -> APIRouter:
    """Return the routes below `/logs`."""
    routes = LogRoutes(logs, limits, body_bytes_max=body_bytes_max)
    # The name of a log may contain slashes. If a path can be split in two ways, the longer name
    # counts.
    router = APIRouter(
        prefix="/logs/{log:path}", tags=["logs"], dependencies=[Depends(check_query)]
    )
    router.post("/records", status_code=HTTPStatus.CREATED, openapi_extra=_APPEND_BODY)(
        routes.append
    )
    router.get("/records")(routes.read)
    router.get("/tail")(routes.tail)
    router.get("/now")(routes.now)
    router.get("/at")(routes.at)
    router.post("/trim", openapi_extra=_json_body(TrimIn))(routes.trim)
    router.get("/retention")(routes.retention)
    router.put("/retention", openapi_extra=_json_body(RetentionIn))(routes.set_retention)
    router.get("/stream", response_class=StreamingResponse)(routes.stream)
    router.get("/records/{seqnum}")(routes.read_one)
    return router


class LogRoutes:
    """The handlers of the routes below `/logs`."""

    def __init__(self, logs: LogSource, limits: RecordLimits, *, body_bytes_max: int) -> None:
        self._logs = logs
        self._limits = limits
        self._records_max = limits.batch_records_max
        self._body_bytes_max = body_bytes_max

    async def append(
        self,
        log: str,
        request: Request,
        tag: Annotated[list[str] | None, Query(description="For a raw body.")] = None,
        position: Position = 0,
    ) -> Response:
        """Append one record, or several atomically (`records`); answer when they are durable.

        The body is JSON, or the data itself as `application/octet-stream` with `tag` in the query.
        """
        opened, session = self._open(log, position)
        body = await body_of(request, self._body_bytes_max)
        if request.headers.get("content-type", "").startswith(_OCTETS):
            seqnum = await opened.append(body, tags=tag or ())
            return _json({"seqnum": seqnum}, session, HTTPStatus.CREATED)
        check_count(body, self._records_max)
        given = decode_json(AppendBody, AppendIn, body, not_done="Nothing was appended")
        entries, is_batch = given.entries()
        if is_batch:
            seqnums = await opened.append_batch(entries, after=given.condition())
            return _json({"seqnums": seqnums}, session, HTTPStatus.CREATED)
        seqnum = await opened.append(entries[0].data, tags=entries[0].tags)
        return _json({"seqnum": seqnum}, session, HTTPStatus.CREATED)

    async def read(
        self,
        log: str,
        request: Request,
        *,
        tag: Tag = None,
        tag_int: TagInt = None,
        bound: Bound = None,
        since: Since = None,
        direction: Literal["next", "prev"] = "next",
        limit: Annotated[int, Query(ge=1, le=READ_RANGE_LIMIT_MAX)] = 100,
        wait: Annotated[float, Query(ge=0, le=WAIT_S_MAX, allow_inf_nan=False)] = 0.0,
        fresh: Fresh = False,
        position: Position = 0,
    ) -> Response:
        """Read records with a tag from `bound` on, ascending (`next`) or descending (`prev`).

        If `bound` is trimmed, the answer is 410. With `since`, or without `bound`, the read starts
        at the first record that is not trimmed. An empty list means that there is no such record.
        `next_bound` is the `bound` of the next page; null: there is no next page. `more` is true if
        the page ended at `limit` or at its limit in bytes, so there may be further records. With
        `wait` (`next` only), the request waits up to that many seconds for a first record.
        """
        opened, session = self._open(log, position)
        wanted = tag_of(tag, tag_int)
        page = PageText(request.scope[SHARE], limit, self._limits)
        if direction == "prev":
            if since is not None:
                raise ValueError("since needs direction=next; with direction=prev give a bound.")
            await _backwards(opened, wanted, bound, page, fresh=fresh)
            next_bound = page.last - 1 if page.last else None
        else:
            start = await _start(opened, bound, since)
            reading = _forwards(opened, wanted, start, page, wait, fresh=fresh)
            next_bound = await (cancel_if_left(request.receive, reading) if wait else reading)
        headers = {"indilog-position": str(session.position)}
        return JsonText(page.text(next_bound), headers=headers)

    async def read_one(
        self,
        log: str,
        seqnum: Annotated[int, Path(ge=0, le=MAX_SEQNUM)],
        *,
        fresh: Fresh = False,
        position: Position = 0,
    ) -> Response:
        """Read the record at a seqnum."""
        opened, session = self._open(log, position)
        record = await opened.read(seqnum, fresh=fresh)
        if record is None:
            sentence = f"Log {log} has no record at seqnum {seqnum}."
            details = problem(HTTPStatus.NOT_FOUND, sentence)
            return Response(
                problem_text(details), status_code=details.status, media_type=MEDIA_TYPE
            )
        return _json(record_out(record), session)

    async def tail(self, log: str, position: Position = 0) -> Response:
        """Return the first seqnum not yet written; linearizable."""
        opened, session = self._open(log, position)
        return _json({"tail": await opened.tail()}, session)

    async def now(self, log: str, position: Position = 0) -> Response:
        """Return the time of the log, seconds since 1970 by the primary's clock."""
        opened, session = self._open(log, position)
        return _json({"time": await opened.now()}, session)

    async def at(self, log: str, time: datetime, position: Position = 0) -> Response:
        """Return the first seqnum ordered at `time` or later, or the tail."""
        opened, session = self._open(log, position)
        return _json({"seqnum": await opened.find_time(_seconds(time))}, session)

    async def trim(self, log: str, request: Request, position: Position = 0) -> Response:
        """Permanently delete the records below `until`, of the whole log or of one tag."""
        opened, session = self._open(log, position)
        body = await body_of(request, SMALL_BYTES_MAX)
        what = parse_json(TrimIn, body, not_done="Nothing was trimmed")
        await opened.trim(what.until, tag=tag_of(what.tag, what.tag_int))
        return _json({"until": what.until}, session)

    async def retention(self, log: str, position: Position = 0) -> Response:
        """Return the log's retention policy; null means no limit."""
        opened, session = self._open(log, position)
        return _json(await opened.retention(), session)

    async def set_retention(self, log: str, request: Request, position: Position = 0) -> Response:
        """Replace the log's retention policy; `{}` keeps everything. The platform trims in the
        background.
        """
        opened, session = self._open(log, position)
        body = await body_of(request, SMALL_BYTES_MAX)
        policy = parse_json(RetentionIn, body, not_done="Nothing was set")
        await opened.set_retention(age_s=policy.age_s, size_bytes=policy.size_bytes)
        return _json(await opened.retention(), session)

    async def stream(
        self,
        log: str,
        request: Request,
        *,
        tag: Tag = None,
        tag_int: TagInt = None,
        bound: Bound = None,
        since: Since = None,
        last_event_id: LastEventId = None,
        position: Position = 0,
    ) -> StreamingResponse:
        """Stream records as server-sent events: first the existing records from `bound` on, then
        new records as they are appended.

        With `since`, or without `bound`, the stream starts at the first record that is not trimmed.
        If `bound` is trimmed, the answer is 410. A client that reconnects with `Last-Event-ID`
        continues after that record.
        """
        opened, _ = self._open(log, position)
        if last_event_id is None:
            start = await _start(opened, bound, since)
        else:
            start = _Start(last_event_id + 1, asked=True)
        await _check_asked(opened, tag_of(tag, tag_int), start)
        events = _events(opened, tag_of(tag, tag_int), start, request.scope[SHARE])
        return StreamingResponse(
            events, media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    def _open(self, name: str, position: int) -> tuple[Log, Session]:
        session = Session(position)
        return self._logs.log(check_log_name(name), session), session


def _seconds(time: datetime) -> float:
    """Return seconds since 1970; a time without a zone is UTC."""
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()


class _Start(NamedTuple):
    """Where a read begins.

    Attributes:
        asked: whether the caller named this seqnum. If so, it is an error that the seqnum is
            trimmed. If not, a read from a trimmed seqnum begins at the log's floor (trim point).
    """

    seqnum: int
    asked: bool

    def at_floor(self, trimmed: TrimmedError) -> _Start:
        """Return the start at the floor that `trimmed` reports.

        Raises:
            TrimmedError: the caller named the seqnum, or the seqnum is not below the floor.
        """
        if self.asked or trimmed.first_seqnum <= self.seqnum:
            raise trimmed
        return _Start(trimmed.first_seqnum, asked=False)


async def _start(log: Log, bound: int | None, since: datetime | None) -> _Start:
    at = await log.find_time(_seconds(since)) if since is not None else 0
    if bound is None or at > bound:
        return _Start(at, asked=False)
    return _Start(bound, asked=True)


async def _check_asked(log: Log, tag: UserTag | None, start: _Start) -> None:
    """Check that a start that the caller named is not trimmed. This happens before the answer
    begins, so that the status can show the error.

    Raises:
        TrimmedError: the start is trimmed.
    """
    if start.asked:
        await log.read_range(tag, start.seqnum, limit=1)


async def _forwards(
    log: Log, tag: UserTag | None, start: _Start, page: PageText, wait_s: float, *, fresh: bool
) -> int:
    """Fill a page in ascending order, and return the bound of the next page."""
    while True:
        try:
            found = await log.read_range(
                tag, start.seqnum, limit=page.limit, wait=wait_s, fresh=fresh
            )
        except TrimmedError as error:
            start = start.at_floor(error)
        else:
            page.add_range(found)
            return start.seqnum if page.last is None else page.last + 1


async def _backwards(
    log: Log, tag: UserTag | None, given: int | None, page: PageText, *, fresh: bool
) -> None:
    """Fill a page in descending order."""
    bound = MAX_SEQNUM if given is None else given
    while not page.is_full and bound >= 0:
        try:
            record = await log.read_prev(tag, bound, fresh=fresh)
        except TrimmedError:
            if page.last is None and given is not None:
                raise
            return
        fresh = False
        if record is None:
            return
        page.add(record)
        bound = record.seqnum - 1


async def _pages(
    log: Log, tag: UserTag | None, start: _Start
) -> AsyncGenerator[list[Record], None]:
    while True:
        found = pages(log, tag, start.seqnum, idle_s=_STREAM_ALIVE_S)
        try:
            async with contextlib.aclosing(found):
                async for page in found:
                    if page:  # from now on, skipping trimmed records would leave a gap
                        start = start._replace(asked=True)
                    yield page
        except TrimmedError as error:
            start = start.at_floor(error)


async def _events(
    log: Log, tag: UserTag | None, start: _Start, share: ByteShare
) -> AsyncIterator[bytes]:
    """Yield the events of a stream. If the byte budget has no room for a page, the stream ends;
    the client can reconnect with `Last-Event-ID`.
    """
    async with contextlib.aclosing(_pages(log, tag, start)) as found:
        async for page in found:
            if not page:
                yield b": alive\n\n"
            share.free()
            try:  # counted twice: while this page is sent, a page of equal size may be read
                share.take_up_to(2 * sum(len(record.data) for record in page))
            except OverloadedError:
                return
            for record in page:
                text = msgspec.json.encode(record_out(record))
                yield b"id: %d\ndata: %s\n\n" % (record.seqnum, text)


def _json_body(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_APPEND_BODY: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": AppendIn.model_json_schema()},
            _OCTETS: {"schema": {"type": "string", "format": "binary"}},
        },
    }
}
