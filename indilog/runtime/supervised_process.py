"""One process that is kept alive: started, watched, started again when it dies (ARCHITECTURE 11).

Supervisor and process are connected by a socket pair. The process writes one line when it is ready
(`ready DETAIL`) or cannot start (`failed SENTENCE`); when its end of the socket reads as closed,
its supervisor is gone, even by kill -9, and it ends too. No process id is ever looked up or reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from asyncio.subprocess import Process
from collections.abc import Sequence

import structlog

from indilog.config import NodeConfig
from indilog.errors import NotReadyError

_LINE_BYTES_MAX = 16 * 1024
_log = structlog.get_logger(__name__)


class SupervisedProcess:
    """Keeps one command running until it is stopped.

    A process that dies is started again after `restart_s_min`, doubled each time up to
    `restart_s_max`; once one lived for longer than that, the pause is short again.

    Args:
        name: for the log.
        command: the program and its arguments; `--supervisor-fd N` is added.
        failures_max: how often it may end before it was ready the first time until that is
            final. Ends with status `os.EX_TEMPFAIL` (it waits for others) do not count; nor does
            any once it was ready: then it is started again for ever.

    Attributes:
        restarts: how often it was started again.
        pid: the process that runs now; None between two.
        detail: what the process said when it became ready last.
    """

    def __init__(
        self, name: str, command: Sequence[str], config: NodeConfig, *, failures_max: int = 3
    ) -> None:
        self.name = name
        self.restarts = 0
        self.pid: int | None = None
        self.detail = ""
        self._command = tuple(command)
        self._config = config
        self._failures_max = failures_max
        self._stopping = asyncio.Event()
        self._changed = asyncio.Condition()
        self._ready = False
        self._was_ready = False
        self._sentence = ""
        self._final: NotReadyError | None = None
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to keep it running."""
        assert self._keeper is None, "started once"
        self._keeper = asyncio.create_task(self._keep(), name=f"keep {self.name}")

    async def ready(self, *, restarts: int = 0) -> str:
        """Wait until it is ready, and return what it said then.

        Args:
            restarts: wait until it was also started again that often, since somebody killed it.

        Raises:
            NotReadyError: it failed to start too often, or was stopped; the process's own sentence
                is in the message.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._final is not None or (self._ready and self.restarts >= restarts)
            )
        if self._final is not None:
            raise self._final
        return self.detail

    async def stop(self) -> None:
        """End it: asked first, killed after `stop_timeout_s`. May be called again."""
        self._stopping.set()
        if self._keeper is not None:
            await asyncio.wait([self._keeper])
            self._keeper.result()

    async def _keep(self) -> None:
        """Run the process again and again, until stopped or until it is hopeless."""
        loop = asyncio.get_running_loop()
        pause_s, failures = self._config.restart_s_min, 0
        while not self._stopping.is_set():
            started = loop.time()
            status = await self._run_once()
            if self._stopping.is_set():
                break
            failures += status != os.EX_TEMPFAIL and not self._was_ready
            if failures >= self._failures_max:
                break
            if loop.time() - started > self._config.restart_s_max:
                pause_s = self._config.restart_s_min
            _log.warning("process died", name=self.name, status=status, again_in_s=pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            pause_s = min(2 * pause_s, self._config.restart_s_max)
            self.restarts += 1
        if self._stopping.is_set():
            final = NotReadyError(f"{self.name} was stopped.")
        else:
            reason = self._sentence or "it died at once; see its log lines above."
            final = NotReadyError(f"{self.name} does not start: {reason}")
        await self._tell(final=final)

    async def _run_once(self) -> int:
        """Start the process, and return its exit status when it is gone."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await self._spawned(theirs.fileno())
            except OSError as error:
                ours.close()
                self._sentence = f"{self._command[0]} cannot be run: {error}"
                return -1
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_LINE_BYTES_MAX)
        self.pid = process.pid
        listener = asyncio.create_task(self._listen(reader))
        stopper = asyncio.create_task(self._stop_when_asked(process))
        try:
            status = await process.wait()
            await asyncio.wait([listener], timeout=1.0)
        finally:
            self.pid = None
            listener.cancel()
            stopper.cancel()
            writer.close()
            await asyncio.gather(listener, stopper, return_exceptions=True)
            await self._tell(ready=False)
        return status

    async def _spawned(self, supervisor_fd: int) -> Process:
        return await asyncio.create_subprocess_exec(
            *self._command,
            "--supervisor-fd",
            str(supervisor_fd),
            pass_fds=[supervisor_fd],
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at a terminal is for the supervisor alone
        )

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Take in the process's lines."""
        with contextlib.suppress(ValueError, ConnectionError):  # a line over the limit; it died
            while line := await reader.readline():
                word, _, text = line.decode(errors="replace").strip().partition(" ")
                if word == "ready":
                    self.detail, self._was_ready = text, True
                    await self._tell(ready=True)
                elif word == "failed":
                    self._sentence = text
                    _log.error("process cannot start", name=self.name, reason=text)

    async def _stop_when_asked(self, process: Process) -> None:
        await self._stopping.wait()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            await asyncio.sleep(self._config.stop_timeout_s)
            _log.warning("process killed", name=self.name, after_s=self._config.stop_timeout_s)
            process.kill()

    async def _tell(self, *, ready: bool = False, final: NotReadyError | None = None) -> None:
        async with self._changed:
            self._ready = ready
            self._final = final or self._final
            self._changed.notify_all()
