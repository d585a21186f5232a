"""A worker process: `python -m compute.workers --fd N --directory DIR --threads N`.

Started by `FunctionHost` only. It ends when its link does, or when its parent is gone, which it
learns from the end of its standard input, even while a function keeps its event loop busy.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import threading
from pathlib import Path

import uvloop

from compute.workers.last_words import LastWords
from compute.workers.runner import Runner
from indilog.calls import LINK_VERSION, Ready
from indilog.link import Link, SocketLink
from indilog.telemetry import configure_logging


async def _serve(fd: int, directory: Path, threads: int, message_bytes_max: int) -> None:
    last_words = LastWords(directory)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    runner = Runner(directory, threads_max=threads, around_import=last_words.exits_told)
    link = Link(runner.serve, message_bytes_max=message_bytes_max, on_lost=lambda _: ended.set())
    stream = socket.socket(fileno=fd)
    stream.setblocking(False)  # noqa: FBT003 - its only form
    await loop.create_unix_connection(lambda: SocketLink(link), sock=stream)
    link.tell(Ready(LINK_VERSION))
    await ended.wait()


def _die_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    """Run until the compute node is gone."""
    parser = argparse.ArgumentParser(prog="compute.workers")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--message-bytes-max", type=int, required=True)
    given = parser.parse_args()
    threading.Thread(target=_die_with_parent, daemon=True).start()
    configure_logging("json")
    given.directory.mkdir(parents=True, mode=0o700)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(given.fd, given.directory, given.threads, given.message_bytes_max))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a sync function may still hold a thread; nobody waits for it any more


if __name__ == "__main__":
    main()
