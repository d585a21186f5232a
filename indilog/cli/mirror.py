"""The command `indilog mirror SOURCE TARGET --log LOG`: copies a log to another platform.

`LogMirror` copies the records. This module connects both platforms, repeats after transient errors,
and prints the progress.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, Final

import typer

from indilog.cli.gateway import explain_mistakes

if TYPE_CHECKING:
    from indilog.mirror import MirrorProgress
    from indilog.remote_client import RemoteClient

SHOWN_EVERY_S: Final = 10.0
_PAUSE_S_MAX: Final = 5.0
AWAY_S_MAX: Final = 600.0
"""Seconds for which a mirror waits for a platform that does not answer."""

SourceUrl = Annotated[str, typer.Argument(help="URL of the platform to copy.", metavar="SOURCE")]
TargetUrl = Annotated[str, typer.Argument(help="URL of the other platform.", metavar="TARGET")]
SkipMissing = Annotated[
    bool,
    typer.Option(
        "--skip-missing", help="Continue after records that are lost, or trimmed before the copy."
    ),
]
Once = Annotated[
    bool, typer.Option("--once", help="End when all present records are copied, do not follow.")
]
LagMax = Annotated[
    float | None,
    typer.Option(min=0.001, help="Warn when the copy is more than this many seconds late."),
]


def mirror(
    source: SourceUrl,
    target: TargetUrl,
    *,
    log: Annotated[str, typer.Option("--log", help="The log to copy.")],
    to: Annotated[str | None, typer.Option("--to", help="Log of TARGET; default: LOG.")] = None,
    once: Once = False,
    skip_missing: SkipMissing = False,
    lag_max_s: LagMax = None,
) -> None:
    """Copy a log to another platform, and keep the copy current. Run it again after a crash.

    Each record is copied once, with its data and tags. The copy gets marks with the tag `mirror`.
    Tokens: the variables INDILOG_SOURCE_TOKEN and INDILOG_TARGET_TOKEN. To copy a stream, use
    `python -m bokistream mirror`.
    """
    import asyncio

    from indilog.mirror import LogMirror

    shown = LagReport(lag_max_s)

    async def copy(sources: RemoteClient, targets: RemoteClient) -> None:
        copying = LogMirror(
            sources.log(log), targets.log(to or log), skip_missing=skip_missing, progress=shown
        )
        await copying.run(follow=not once)

    with explain_mistakes():
        asyncio.run(keep_copying(source, target, copy, shown))
    shown.end()


class LagReport:
    """Prints how far a mirror is: at most every 10 seconds, and when its lag exceeds a limit.

    Args:
        lag_max_s: seconds above which a warning is printed; None: never.
    """

    def __init__(self, lag_max_s: float | None) -> None:
        self._lag_max_s = lag_max_s
        self._last: MirrorProgress | None = None
        self._shown_at = -SHOWN_EVERY_S
        self._copied_before = 0
        self._is_late = False
        self.progressed_at = time.monotonic()

    def __call__(self, progress: MirrorProgress) -> None:
        """Note the progress."""
        self._last = progress
        self.progressed_at = now = time.monotonic()
        is_late = self._lag_max_s is not None and progress.lag_s > self._lag_max_s
        if is_late != self._is_late or now >= self._shown_at + SHOWN_EVERY_S:
            self._shown_at, self._is_late = now, is_late
            self._show(progress)

    def restarted(self) -> None:
        """Note that a new connection counts its records from 0."""
        if self._last is not None:
            self._copied_before += self._last.copied
            self._last = self._last._replace(copied=0)

    def end(self) -> None:
        """Print the last progress."""
        if self._last is not None:
            self._show(self._last)

    def _show(self, progress: MirrorProgress) -> None:
        late = "; the lag exceeds its limit" if self._is_late else ""
        copied = self._copied_before + progress.copied
        sys.stdout.write(
            f"copied {copied:,} records, all below {progress.next_seqnum}; "
            f"lag {progress.lag_s:.1f} s{late}\n"
        )
        sys.stdout.flush()


async def keep_copying(
    source: str,
    target: str,
    copy: Callable[[RemoteClient, RemoteClient], Awaitable[None]],
    shown: LagReport,
) -> None:
    """Connect both platforms and copy. While a platform does not answer, wait and connect again, up
    to 10 minutes without progress.

    Raises:
        IndilogError: an error that is not retryable, or a platform does not answer.
    """
    import asyncio

    from indilog.base.errors import IndilogError, OutcomeUnknownError
    from indilog.remote_client import connect

    pause_s = 0.2
    while True:
        began = time.monotonic()
        try:
            async with AsyncExitStack() as stack:
                clients = [
                    await stack.enter_async_context(connect(url, token=os.environ.get(variable)))
                    for url, variable in (
                        (source, "INDILOG_SOURCE_TOKEN"),
                        (target, "INDILOG_TARGET_TOKEN"),
                    )
                ]
                await copy(clients[0], clients[1])
                return
        except IndilogError as error:
            is_transient = error.retryable or isinstance(error, OutcomeUnknownError)
            now = time.monotonic()
            if not is_transient or now > shown.progressed_at + AWAY_S_MAX:
                raise
            sys.stderr.write(f"{error} The mirror tries again.\n")
            if shown.progressed_at > began:
                pause_s = 0.2
        shown.restarted()
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S_MAX)
