"""Starts the processes of nodes with a fork server (docs/decisions/0034).

The supervisor's `SupervisedProcess`es start their processes through one `NodeStarter`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from indilog.runtime.cluster import fork_server
from indilog.runtime.cluster.held_process import STATUS_UNKNOWN, HeldProcess, Process, executed

_READY_S_MAX: Final = 180.0
"""Seconds that a fork server may take to import the modules of nodes."""
_ANSWER_S_MAX: Final = 60.0
"""Seconds that a fork server may take to fork, and to report that a child has ended. A fork takes
milliseconds, but longer on a busy machine. A fork server that takes longer than this is killed.
"""
_END_S_MAX: Final = 5.0
"""Seconds that a fork server may take to end after its socket was closed. Then it is killed."""
_MESSAGE_BYTES_MAX: Final = 4096
_log = structlog.get_logger(__name__)


class _Forked(HeldProcess):
    """A child of a fork server. The fork server reports the child's exit status.

    Args:
        status: the exit status; set when the fork server has reported it or has ended.
        on_silence: called if the fork server does not report the exit status in time.
    """

    def __init__(
        self,
        pid: int,
        descriptor: int,
        status: asyncio.Future[int],
        on_silence: Callable[[], None],
    ) -> None:
        super().__init__(pid, descriptor)
        self._status = status
        self._on_silence = on_silence

    async def wait(self) -> int:
        """Wait for the end of the child, and return its exit status. If the fork server has ended
        too, return `STATUS_UNKNOWN`.
        """
        await super().wait()
        await asyncio.wait({self._status}, timeout=_ANSWER_S_MAX)
        if not self._status.done():
            self._on_silence()
        return await self._status


class _ForkServer:
    """A running fork server.

    Every method that waits raises OSError if the fork server is lost or does not answer in time.
    """

    def __init__(self, process: asyncio.subprocess.Process, channel: socket.socket) -> None:
        self._process = process
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._statuses: dict[int, asyncio.Future[int]] = {}
        """The exit statuses of running children, by process id."""
        self._answer: asyncio.Future[_Forked | None] = self._loop.create_future()
        """The next answer of the fork server. The first answer is `ready`."""
        self.is_lost = False
        channel.settimeout(0)
        self._loop.add_reader(channel.fileno(), self._on_readable)

    @classmethod
    async def start(cls) -> _ForkServer:
        """Start a fork server; return when it can fork."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *fork_server.command(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        server = cls(process, ours)
        try:
            await server._answered(_READY_S_MAX)
        except OSError:
            await server.close()
            raise
        return server

    async def fork(self, command: Sequence[str], descriptors: Sequence[int]) -> Process:
        """Fork a child; one call at a time."""
        text = "\0".join(command).encode()
        try:
            socket.send_fds(self._channel, [text], descriptors)
        except OSError:
            self._lose()  # the fork server was killed, and the event loop has not noticed yet
            raise
        self._answer = self._loop.create_future()
        child = await self._answered(_ANSWER_S_MAX)
        assert child is not None, "it was ready before"
        return child

    async def _answered(self, within_s: float) -> _Forked | None:
        try:
            async with asyncio.timeout(within_s):
                return await self._answer
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Kill the fork server, because it hangs. A new fork server replaces it."""
        self._lose()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _lose(self) -> None:
        """Close the connection, so that the fork server ends."""
        if self.is_lost:
            return
        self.is_lost = True
        self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        for status in self._statuses.values():
            status.set_result(STATUS_UNKNOWN)
        self._statuses.clear()
        if not self._answer.done():
            self._answer.set_exception(ConnectionResetError("the fork server is gone"))

    async def close(self) -> None:
        """Let the fork server end, and wait until it has ended. Its children continue."""
        self._lose()
        try:
            async with asyncio.timeout(_END_S_MAX):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _on_readable(self) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(
                self._channel, _MESSAGE_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            message, descriptors = b"", []
        word, _, text = message.decode(errors="replace").partition(" ")
        if word == "ended":
            pid, status = text.split()
            self._statuses.pop(int(pid)).set_result(int(status))
        elif word == "started":
            self._on_started(int(text), descriptors[0])
        elif word == "refused":
            self._answer.set_exception(OSError(text))
        elif word == "ready":
            self._answer.set_result(None)
        else:
            self._lose()

    def _on_started(self, pid: int, descriptor: int) -> None:
        status = self._statuses[pid] = self._loop.create_future()
        self._answer.set_result(_Forked(pid, descriptor, status, self._give_up))


class NodeStarter:
    """Forks the processes of nodes. If the fork server fails, `NodeStarter` executes their
    commands.

    A lost fork server is replaced at the next start of a node. A fork server that does not answer
    in time is killed. If it had already forked a child that was not reported, this child ends when
    its connection to the supervisor closes.
    """

    def __init__(self) -> None:
        self._server: _ForkServer | None = None
        self._is_usable = True
        """False after a fork server did not become ready, because another one would also fail."""
        self._one_at_a_time = asyncio.Lock()

    async def start(
        self, command: Sequence[str], inherited: Sequence[int]
    ) -> tuple[socket.socket, Process]:
        """Start the process of a node; see `Start`."""
        try:
            # A `ConnectionError` shows that the fork server was lost since the last start. The
            # second attempt starts a new fork server.
            with contextlib.suppress(ConnectionError):
                return await self._fork(command, inherited)
            return await self._fork(command, inherited)
        except OSError as error:
            _log.warning("node is executed, because the fork server failed", reason=str(error))
        return await executed(command, inherited)

    async def close(self) -> None:
        """End the fork server. The processes that it forked continue. May be called again."""
        if self._server is not None:
            await self._server.close()

    async def _fork(
        self, command: Sequence[str], inherited: Sequence[int]
    ) -> tuple[socket.socket, Process]:
        async with self._one_at_a_time:
            if not self._is_usable:
                raise ConnectionRefusedError("it did not start")
            server = await self._running()
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    return ours, await server.fork(command, [theirs.fileno(), *inherited])
                except BaseException:
                    ours.close()
                    raise

    async def _running(self) -> _ForkServer:
        """Return a fork server that can fork."""
        if self._server is None or self._server.is_lost:
            await self.close()
            try:
                self._server = await _ForkServer.start()
            except OSError:
                self._is_usable = False
                raise
        return self._server
