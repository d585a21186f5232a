"""Keeps one process running: starts or adopts it, watches it, and restarts it when it dies or hangs
(ARCHITECTURE 11).

A socket connects the supervisor and the process. The process sends lines of text over the socket
(`supervisor_link`). A process hangs if it was ready and then sends no heartbeat for `hang_s`. A
process that hangs, or is not ready within `start_timeout_s`, is killed and restarted.

A process may outlive its supervisor. Then the next supervisor adopts the process, and holds it by a
descriptor (pidfd), so that it never signals a reused process id. `Supervisor` and `Scaling` have
one `SupervisedProcess` for each process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from indilog.base.errors import NotReadyError
from indilog.base.restart_pauses import RestartPauses
from indilog.config import NodeConfig
from indilog.runtime.cluster.held_process import (
    STATUS_UNKNOWN,
    Process,
    Start,
    connected,
    executed,
)
from indilog.runtime.cluster.supervisor_link import HEARTBEATS_PER_HANG

_LINE_BYTES_MAX: Final = 16 * 1024
_log = structlog.get_logger(__name__)


class SupervisedProcess:
    """Keeps one process running until it is stopped.

    If a process of an earlier supervisor listens at `control`, this process is adopted, and no new
    process is started. A process that dies is restarted after `restart_s_min`. The pause doubles
    each time, up to `restart_s_max`. If a process lived longer than `restart_s_max`, the pause is
    `restart_s_min` again.

    Args:
        name: name for log lines.
        command: the program and its arguments; `--supervisor-fd N` is added.
        control: the Unix socket at which the process can be adopted; None: it cannot be adopted.
        inherited: descriptors that the process inherits and keeps open.
        failures_max: if the process exits so many times before it was ever ready, it is not
            restarted. An exit with status `os.EX_TEMPFAIL` (it waits for other processes) does not
            count; `os.EX_DATAERR` (data is lost) is final. A process that was ready once is
            restarted without limit.
        start: starts the process.

    Attributes:
        restarts: number of restarts.
        adopted: whether an earlier supervisor started the running process.
        pid: process id; None while no process runs.
        detail: the text that the process sent when it last became ready.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        config: NodeConfig,
        *,
        control: Path | None = None,
        inherited: Sequence[int] = (),
        failures_max: int = 3,
        start: Start = executed,
    ) -> None:
        self.name = name
        self.restarts = 0
        self.adopted = False
        self.pid: int | None = None
        self.detail = ""
        self._command = tuple(command)
        self._config = config
        self._control = control
        self._inherited = tuple(inherited)
        self._start = start
        self._last_heartbeat_at = 0.0
        """When the process was started or sent its last heartbeat, on the loop's clock."""
        self._silent_s_max = 0.0
        """Seconds that the process may be silent after `_last_heartbeat_at`."""
        self._failures_max = failures_max
        self._stopping = asyncio.Event()
        self._changed = asyncio.Condition()
        self._up = False
        self._ready = False
        self._drained = False
        self._was_ready = False
        self._sentence = ""
        self._final: NotReadyError | None = None
        self._data_lost: NotReadyError | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._process: Process | None = None

    def start(self) -> None:
        """Start the process, and keep it running."""
        assert self._keeper is None, "started once"
        self._keeper = asyncio.create_task(self._keep(), name=f"keep {self.name}")

    async def ready(self, *, restarts: int = 0) -> str:
        """Wait until the process is ready, and return its `detail`.

        Args:
            restarts: wait until the process has also been restarted this many times.

        Raises:
            NotReadyError: the process failed to start too often, or was stopped. The message
                contains the process's own sentence.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._final is not None or (self._ready and self.restarts >= restarts)
            )
        if self._final is not None:
            raise self._final
        return self.detail

    async def wait_for_data_loss(self) -> NotReadyError:
        """Wait until the process has ended because data is lost, and has not become ready since.
        Return an error with the process's sentence.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._data_lost is not None)
        assert self._data_lost is not None, "it was waited for"
        return self._data_lost

    async def up(self) -> None:
        """Wait until the roles of the process run, or the process has failed too often."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._final is not None or self._up)

    @property
    def is_up(self) -> bool:
        """Whether the roles of the process run. The process may not be ready yet."""
        return self._up

    @property
    def is_drained(self) -> bool:
        """Whether the process has ended its gateway, and has not been restarted since."""
        return self._drained

    async def drain(self) -> None:
        """Send SIGTERM, so that the process ends its gateway. Wait at most `stop_timeout_s` until
        its running calls have ended. A process of several nodes then runs its nodes until `stop`. A
        process of a single node ends.
        """
        if (process := self._process) is None or self._drained:
            return
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            process.terminate()
            async with asyncio.timeout(self._config.processes.stop_timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._drained or self._process is not process)

    @property
    def has_failed(self) -> bool:
        """Whether the process has failed so often that it is not restarted."""
        return self._final is not None

    async def stop(self) -> None:
        """End the process by SIGTERM, or after `stop_timeout_s` seconds by SIGKILL. May be called
        again.
        """
        self._stopping.set()
        if self._keeper is not None:
            await asyncio.wait([self._keeper])
            self._keeper.result()

    async def end(self) -> bool:
        """End a process of an earlier supervisor instead of adopting it. Return False if there is
        no such process.

        The process gets SIGTERM, and after `stop_timeout_s` SIGKILL.
        """
        assert self._control is not None, "such a process is found at `control`"
        self._stopping.set()
        if (found := connected(self._control)) is not None:
            await self._watched_until_gone(found[1], found[0])
        return found is not None

    async def _keep(self) -> None:
        """Run and restart the process until it is stopped or has failed too often."""
        loop = asyncio.get_running_loop()
        processes, failures = self._config.processes, 0
        pauses = RestartPauses(processes.restart_s_min, processes.restart_s_max)
        while not self._stopping.is_set():
            started = loop.time()
            status = await self._run_once()
            if self._stopping.is_set():
                break
            failures += status != os.EX_TEMPFAIL and not self._was_ready
            if status == os.EX_DATAERR:
                self._data_lost = self._not_started()
                await self._set_state()
            hopeless = status == os.EX_DATAERR and not self._was_ready
            if failures >= self._failures_max or hopeless:
                break
            pause_s = pauses.after(loop.time() - started)
            _log.warning("process died", name=self.name, status=status, again_in_s=pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
            self.restarts += 1
        if self._stopping.is_set():
            final = NotReadyError(f"{self.name} was stopped.")
        else:
            final = self._not_started()
        await self._set_state(final=final)

    def _not_started(self) -> NotReadyError:
        reason = self._sentence or "it died at once; see its log lines above."
        return NotReadyError(f"{self.name} does not start: {reason}")

    async def _run_once(self) -> int:
        """Adopt or start the process, and return its exit status when it has ended."""
        found = connected(self._control) if self._control is not None else None
        self.adopted = found is not None
        self._last_heartbeat_at = asyncio.get_running_loop().time()
        self._silent_s_max = self._config.processes.start_timeout_s
        process: Process
        if found is not None:
            ours, process = found
            # An adopted process was ready before. If it hangs, the connection is still established,
            # but the process sends nothing.
            self._silent_s_max = self._config.processes.hang_s
            _log.info("process adopted", name=self.name, pid=process.pid)
        else:
            try:
                ours, process = await self._start(self._command, self._inherited)
            except OSError as error:
                self._sentence = f"{self._command[0]} cannot be run: {error}"
                return STATUS_UNKNOWN
            self._last_heartbeat_at = asyncio.get_running_loop().time()
        return await self._watched_until_gone(process, ours)

    async def _watched_until_gone(self, process: Process, connection: socket.socket) -> int:
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=_LINE_BYTES_MAX)
        self.pid, self._process = process.pid, process
        listener = asyncio.create_task(self._listen(reader))
        others = [
            asyncio.create_task(self._stop_when_asked(process)),
            asyncio.create_task(self._kill_when_hung(process)),
        ]
        try:
            status = await process.wait()
            # After this call, the listener reads the remaining lines and then ends. Without it, the
            # listener would not end if a child of the process has a copy of the socket.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RD)
            await asyncio.wait([listener])
        finally:
            self.pid = self._process = None
            for task in (listener, *others):
                task.cancel()
            writer.close()
            await asyncio.gather(listener, *others, return_exceptions=True)
            await self._set_state(up=False, ready=False, drained=False)
        return status

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Handle the lines that the process sends, until the socket ends."""
        with contextlib.suppress(ConnectionError):  # the process died
            while line := await _next_line(reader):
                await self._on_line(line)

    async def _on_line(self, line: bytes) -> None:
        word, _, text = line.decode(errors="replace").strip().partition(" ")
        if word in {"ready", "heartbeat"}:
            self._last_heartbeat_at = asyncio.get_running_loop().time()
            self._silent_s_max = self._config.processes.hang_s
        if word == "ready":
            self.detail, self._was_ready = text, True
            self._data_lost = None
            await self._set_state(up=True, ready=True)
        elif word == "up":
            await self._set_state(up=True)
        elif word == "drained":
            await self._set_state(up=True, drained=True)
        elif word == "failed":
            self._sentence = text
            _log.error("process cannot start", name=self.name, reason=text)

    async def _kill_when_hung(self, process: Process) -> None:
        """Kill the process if it is not ready within `start_timeout_s`, or if it was ready and then
        sends no heartbeat for `hang_s`.
        """
        loop = asyncio.get_running_loop()
        pause_s = self._config.processes.hang_s / HEARTBEATS_PER_HANG
        looked_at = loop.time()
        while True:
            await asyncio.sleep(pause_s)
            before, looked_at = looked_at, loop.time()
            if looked_at - before > 2 * pause_s:
                # The supervisor itself was paused. So heartbeats may have arrived that it has not
                # read yet.
                self._last_heartbeat_at = looked_at
            elif looked_at - self._last_heartbeat_at > (silent_s := self._silent_s_max):
                if not self._was_ready:
                    self._sentence = f"it was not ready within {silent_s:g} s (start_timeout_s)."
                _log.warning("process hangs and is killed", name=self.name, silent_s=silent_s)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                return

    async def _stop_when_asked(self, process: Process) -> None:
        await self._stopping.wait()
        timeout_s = self._config.processes.stop_timeout_s
        with contextlib.suppress(ProcessLookupError):
            await self.drain()
            process.terminate()  # if the process has drained, this is the second SIGTERM
            await asyncio.sleep(timeout_s)
            _log.warning("process killed", name=self.name, after_s=timeout_s)
            process.kill()

    async def _set_state(
        self,
        *,
        up: bool = False,
        ready: bool = False,
        drained: bool = False,
        final: NotReadyError | None = None,
    ) -> None:
        async with self._changed:
            self._up, self._ready, self._drained = up, ready, drained
            self._final = final or self._final
            self._changed.notify_all()


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    """Return the next line of at most `_LINE_BYTES_MAX`; empty at the end of the stream."""
    while True:
        with contextlib.suppress(ValueError):  # the line exceeds the limit; it is skipped
            return await reader.readline()
