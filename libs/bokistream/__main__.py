"""`python -m bokistream list | show | read | truncate | seal | delete | mirror`: looks into the
streams of a running platform, changes them, and copies a stream to another platform.

An error is one sentence on standard error. The exit code is 2 for a mistake in the command, and 1
if a correct command failed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from os import environ
from typing import Annotated, Final, NoReturn, TypeVar

import typer

import indilog
from bokistream.chain import StreamRecord
from bokistream.mirror import StreamMirror, StreamMirrorProgress
from bokistream.status import StreamStatus
from bokistream.streams import Streams

_T = TypeVar("_T")
_SHOWN_CHARACTERS_MAX: Final = 80
_SHOWN_EVERY_S: Final = 10.0
_AWAY_S_MAX: Final = 600.0
"""Seconds for which a mirror waits for a platform that does not answer."""
_PAUSE_S_MAX: Final = 5.0

commands = typer.Typer(
    help="Look into streams, change them, and copy them to another platform.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

LogName = Annotated[str, typer.Argument(help="The log of the streams.", metavar="LOG")]
StreamName = Annotated[str, typer.Argument(help="The stream's name.", metavar="STREAM")]
Url = Annotated[
    str | None,
    typer.Option(envvar="INDILOG_URL", help="URL of the platform's gateway; default: port 8080."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do it; there is no way back.")]


@commands.command(name="list")
def list_streams(log: LogName, *, as_json: AsJson = False, url: Url = None) -> None:
    """Print the streams of a log, with their writers, records and bytes."""

    async def ask(streams: Streams) -> list[StreamStatus]:
        return [await streams.status(info.name) for info in await streams.list()]

    for status in _run(url, log, ask):
        typer.echo(_as_json(status) if as_json else f"{status.info.name}  {_summary(status)}")


@commands.command()
def show(log: LogName, stream: StreamName, *, as_json: AsJson = False, url: Url = None) -> None:
    """Print a stream's settings, its writer, its named readers, and what each writer appended."""
    status = _run(url, log, lambda streams: streams.status(stream))
    if as_json:
        typer.echo(_as_json(status))
        return
    info = status.info
    typer.echo(f"{info.name}  {_summary(status)}")
    age = "kept" if info.age_s is None else f"kept for {info.age_s:g} s"
    size = "" if info.size_bytes is None else f", the newest {info.size_bytes:,} bytes"
    typer.echo(f"records are {age}{size}; truncated ones for {info.grace_s:g} s")
    beat = status.heartbeat_age_s
    writer = "no writer has been heard" if beat is None else f"last heartbeat {beat:.0f} s ago"
    typer.echo(f"fencing token {status.last.token}, {writer}")
    for reader in status.readers:
        behind = "truncated" if reader.behind is None else f"{reader.behind:,} records behind"
        typer.echo(f"reader {reader.name}: {behind}")
    for part in _run(url, log, lambda streams: streams.segments(stream, limit=10)):
        first = "?" if part.first_offset is None else str(part.first_offset)
        typer.echo(f"writer {part.token}: offsets {first} to {part.end_offset}")


@commands.command()
def read(
    log: LogName,
    stream: StreamName,
    *,
    from_txid: Annotated[int | None, typer.Option(min=0, help="First transaction id.")] = None,
    from_offset: Annotated[int | None, typer.Option(min=0, help="First offset.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Print at most this many.")] = 100,
    truncated: Annotated[bool, typer.Option("--truncated", help="Truncated ones, too.")] = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Print records of a stream: offset, seqnum, transaction id and data."""

    async def ask(streams: Streams) -> list[StreamRecord]:
        found: list[StreamRecord] = []
        reading = streams.read(
            stream, from_txid=from_txid, from_offset=from_offset, include_truncated=truncated
        )
        async for record in reading:
            found.append(record)
            if len(found) == limit:
                break
        await reading.aclose()
        return found

    for record in _run(url, log, ask):
        typer.echo(_record_as_json(record) if as_json else _record_line(record))


@commands.command()
def truncate(
    log: LogName,
    stream: StreamName,
    *,
    before_seqnum: Annotated[int | None, typer.Option(min=0, help="Below this seqnum.")] = None,
    before_txid: Annotated[int | None, typer.Option(min=0, help="Smaller ids than this.")] = None,
    url: Url = None,
) -> None:
    """Truncate a stream. Its records can be read with `read --truncated` for its grace period."""
    start = _run(
        url,
        log,
        lambda streams: streams.truncate(
            stream, before_seqnum=before_seqnum, before_txid=before_txid
        ),
    )
    typer.echo(f"The stream is truncated below seqnum {start}.")


@commands.command()
def seal(log: LogName, stream: StreamName, *, yes: Yes = False, url: Url = None) -> None:
    """End a stream permanently: no further record can be appended."""
    if not yes:
        _stop(f"This ends stream {stream!r} permanently; repeat it with --yes.", 2)
    _run(url, log, lambda streams: streams.seal(stream))
    typer.echo("The stream is sealed.")


@commands.command()
def delete(log: LogName, stream: StreamName, *, yes: Yes = False, url: Url = None) -> None:
    """Delete a stream and all its records permanently."""
    if not yes:
        _stop(f"This deletes stream {stream!r} with its records; repeat it with --yes.", 2)
    _run(url, log, lambda streams: streams.delete(stream))
    typer.echo("The stream is deleted.")


@commands.command()
def mirror(
    source: Annotated[str, typer.Argument(help="URL of the platform to copy.", metavar="SOURCE")],
    target: Annotated[str, typer.Argument(help="URL of the other one.", metavar="TARGET")],
    log: LogName,
    stream: StreamName,
    *,
    once: Annotated[bool, typer.Option("--once", help="Do not follow the stream.")] = False,
) -> None:
    """Copy a stream to the same log of another platform, and keep the copy current.

    The copy has each record once, with the same offset and transaction id. Run the command again
    after a crash. Tokens: the variables INDILOG_SOURCE_TOKEN and INDILOG_TARGET_TOKEN.
    """
    shown = _LagReport()
    try:
        asyncio.run(_keep_copying(source, target, log, stream, shown, follow=not once))
    except indilog.IndilogError as error:
        _stop(str(error), 1 if error.retryable else 2)
    except ValueError as error:
        _stop(str(error), 2)
    typer.echo("The copy has all records of the stream.")


class _LagReport:
    """Prints the progress of a mirror, at most every 10 seconds."""

    def __init__(self) -> None:
        self.progressed_at = time.monotonic()
        self._shown_at = -_SHOWN_EVERY_S

    def __call__(self, progress: StreamMirrorProgress) -> None:
        self.progressed_at = now = time.monotonic()
        if now >= self._shown_at + _SHOWN_EVERY_S:
            self._shown_at = now
            typer.echo(f"copied to offset {progress.next_offset:,}; lag {progress.lag_s:.1f} s")


async def _keep_copying(
    source: str, target: str, log: str, stream: str, shown: _LagReport, *, follow: bool
) -> None:
    """Copy the stream; while a platform does not answer, wait and connect again."""
    pause_s = 0.2
    while True:
        try:
            async with AsyncExitStack() as stack:
                opened = [
                    await stack.enter_async_context(indilog.connect(url, token=environ.get(name)))
                    for url, name in (
                        (source, "INDILOG_SOURCE_TOKEN"),
                        (target, "INDILOG_TARGET_TOKEN"),
                    )
                ]
                streams = [Streams(client.log(log)) for client in opened]
                copying = StreamMirror(streams[0], streams[1], stream, progress=shown)
                await copying.run(follow=follow)
                return
        except indilog.IndilogError as error:
            is_transient = error.retryable or isinstance(error, indilog.OutcomeUnknownError)
            if not is_transient or time.monotonic() > shown.progressed_at + _AWAY_S_MAX:
                raise
            sys.stderr.write(f"{error} The mirror tries again.\n")
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S_MAX)


def _run(url: str | None, log: str, ask: Callable[[Streams], Awaitable[_T]]) -> _T:
    async def connected() -> _T:
        async with indilog.connect(*([] if url is None else [url])) as client:
            return await ask(Streams(client.log(log)))

    try:
        return asyncio.run(connected())
    except indilog.IndilogError as error:
        _stop(str(error), 1 if error.retryable else 2)
    except ValueError as error:
        _stop(str(error), 2)


def _stop(sentence: str, code: int) -> NoReturn:
    sys.stderr.write(f"{sentence}\n")
    raise typer.Exit(code)


def _summary(status: StreamStatus) -> str:
    last = status.last
    end = "sealed" if last.is_sealed else "open"
    return (
        f"{end}, {last.offset:,} records, {last.size_bytes:,} bytes, last txid {last.txid}, "
        f"readable from seqnum {status.info.start}"
    )


def _as_json(status: StreamStatus) -> str:
    info, last = status.info, status.last
    return json.dumps(
        {
            "name": info.name,
            "created_at": info.created_at,
            "age_s": info.age_s,
            "size_bytes": info.size_bytes,
            "grace_s": info.grace_s,
            "start_seqnum": info.start,
            "last_seqnum": last.seqnum,
            "last_txid": last.txid,
            "next_offset": last.offset,
            "total_bytes": last.size_bytes,
            "fencing_token": last.token,
            "is_sealed": last.is_sealed,
            "heartbeat_age_s": status.heartbeat_age_s,
            "readers": [reader._asdict() for reader in status.readers],
        }
    )


def _record_line(record: StreamRecord) -> str:
    text = repr(record.data)[2:-1]
    if len(text) > _SHOWN_CHARACTERS_MAX:
        text = text[:_SHOWN_CHARACTERS_MAX] + "..."
    return f"{record.offset}  {record.seqnum}  txid {record.txid}  {text}"


def _record_as_json(record: StreamRecord) -> str:
    said = record._asdict()
    data = said.pop("data")
    try:
        said["data"] = data.decode()
    except UnicodeDecodeError:
        said["data_hex"] = data.hex()
    return json.dumps(said)


if __name__ == "__main__":
    commands(prog_name="python -m bokistream")
