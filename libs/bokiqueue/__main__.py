"""`python -m bokiqueue show | peek | redrive | purge LOG QUEUE`: look into a queue of a running
platform, and move or remove its messages.

An error is one sentence on standard error. The exit code is 2 for a mistake in the command, and 1
if a correct command failed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated, NoReturn, TypeVar

import typer

import indilog
from bokiqueue.queue import PeekedMessage, Queue, ShardStats

_T = TypeVar("_T")
_SHOWN_CHARACTERS_MAX = 80

commands = typer.Typer(
    help="Look into queues, and move or remove their messages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

LogName = Annotated[str, typer.Argument(help="The queue's log.", metavar="LOG")]
QueueName = Annotated[str, typer.Argument(help="The queue's name.", metavar="QUEUE")]
Url = Annotated[
    str | None,
    typer.Option(envvar="INDILOG_URL", help="URL of the platform's gateway; default: port 8080."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
Dead = Annotated[bool, typer.Option("--dead", help="The dead letters instead of the messages.")]


@commands.command()
def show(log: LogName, queue: QueueName, *, as_json: AsJson = False, url: Url = None) -> None:
    """Print how many messages the queue and each of its shards has."""
    stats = _run(url, log, queue, Queue.stats)
    if as_json:
        typer.echo(json.dumps(asdict(stats)))
        return
    typer.echo("shard  depth  leased  dead  oldest")
    typer.echo(_row("all", stats))
    for number, shard in enumerate(stats.shards):
        typer.echo(_row(str(number), shard))


@commands.command()
def peek(
    log: LogName,
    queue: QueueName,
    *,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Print at most this many.")] = 10,
    dead: Dead = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Print messages without taking them: seqnum, state, tries and data."""
    for message in _run(url, log, queue, lambda q: q.peek(limit, dead=dead)):
        typer.echo(_as_json(message) if as_json else _line(message))


@commands.command()
def redrive(log: LogName, queue: QueueName, *, url: Url = None) -> None:
    """Make all dead letters ready again, with all their tries."""
    count = _run(url, log, queue, Queue.redrive)
    typer.echo(f"{count} dead letters are ready again.")


@commands.command()
def purge(
    log: LogName,
    queue: QueueName,
    *,
    dead: Dead = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; there is no way back.")] = False,
    url: Url = None,
) -> None:
    """Remove all messages but the dead letters, or all dead letters, permanently."""
    if not yes:
        what = "dead letters" if dead else "messages"
        _stop(f"This removes all {what} of queue {queue!r} permanently; repeat it with --yes.", 2)
    count = _run(url, log, queue, lambda q: q.purge(dead=dead))
    typer.echo(f"{count} {'dead letters' if dead else 'messages'} were removed.")


def _run(url: str | None, log: str, name: str, ask: Callable[[Queue], Awaitable[_T]]) -> _T:
    async def connected() -> _T:
        async with indilog.connect(*([] if url is None else [url])) as client:
            return await ask(await Queue.existing(client.log(log), name))

    try:
        return asyncio.run(connected())
    except indilog.IndilogError as error:
        _stop(str(error), 1 if error.retryable else 2)
    except ValueError as error:
        _stop(str(error), 2)


def _stop(sentence: str, code: int) -> NoReturn:
    sys.stderr.write(f"{sentence}\n")
    raise typer.Exit(code)


def _row(name: str, stats: ShardStats) -> str:
    counts = f"{stats.depth:>5}  {stats.leased:>6}  {stats.dead:>4}"
    return f"{name:>5}  {counts}  {stats.oldest_age_s:>4.0f} s"


def _line(message: PeekedMessage) -> str:
    text = repr(message.data)[2:-1]
    if len(text) > _SHOWN_CHARACTERS_MAX:
        text = text[:_SHOWN_CHARACTERS_MAX] + "..."
    return f"{message.seqnum}  {message.state:<7}  {message.tries} tries  {text}"


def _as_json(message: PeekedMessage) -> str:
    said = asdict(message)
    data = said.pop("data")
    try:
        said["data"] = data.decode()
    except UnicodeDecodeError:
        said["data_hex"] = data.hex()
    return json.dumps(said)


if __name__ == "__main__":
    commands(prog_name="python -m bokiqueue")
