"""Injects one fault into a running cluster, and undoes it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Final

from indilog.runtime.journal.segment import segment_numbers, segment_path
from tests.cluster.faults.small_disk import MIB, SmallDisk
from tests.nemesis.promise import CLOCK, EVERYTHING, SUPERVISOR, ZOOKEEPER, Fault
from tests.nemesis.proxies import Direction, Proxies
from tests.nemesis.tested_cluster import TestedCluster, drawn_bit

RECOVERY_S_MAX: Final = 120.0
REPAIR_S_MAX: Final = 1200.0
"""A storage node that lost its disk fetches what it had while others append and trim."""
FIGURES_S: Final = 11.0
"""Seconds after which figures of a process that has ended are no longer shown."""
AHEAD_S: Final = (-600.0, 600.0, -366 * 86_400.0, 366 * 86_400.0)
"""How far clocks jump. A start believes ten minutes, and no year (`clock_gap_s_max`)."""
_SYNC_DELAY_US: Final = 100_000


class Faults:
    """Injects faults into a cluster; `disks` are the small disks of some nodes."""

    def __init__(
        self, cluster: TestedCluster, proxies: Proxies, disks: dict[str, SmallDisk]
    ) -> None:
        self._cluster = cluster
        self._proxies = proxies
        self._disks = disks
        self._killed: dict[str, int | None] = {}
        """The process of a node that was killed last."""
        self._positions: dict[str, int] = {}
        """By node whose disk was harmed: how many metalog entries the cluster then had."""
        self._by_kind: dict[str, Callable[[Fault], Awaitable[str]]] = {
            "kill": self._kill,
            "stop": self._stop,
            "partition": self._part,
            "one-sided partition": self._part_one_side,
            "kill everything": self._kill_everything,
            "kill supervisor": self._kill_helper,
            "kill ZooKeeper's leader": self._kill_helper,
            "kill worker": self._kill_worker,
            "wiped disk": self._wipe,
            "flipped bit": self._flip,
            "full disk": self._fill,
            "slow disk": self._slow,
            "failed sync": self._fail_sync,
            "clock jump": self._jump,
        }
        assert self._by_kind.keys() >= cluster.topology.kinds.keys()

    async def inject(self, fault: Fault) -> str:
        """Inject a fault, undo it, and return what was done in words."""
        return await self._by_kind[fault.kind](fault)

    async def recovered(self, fault: Fault) -> str:
        """Wait until the cluster has recovered from a fault; return what was wrong last.

        Raises:
            TimeoutError: it has not; the message says what is wrong.
        """
        if fault.target in (SUPERVISOR, ZOOKEEPER, CLOCK):
            return ""  # `start_again` returns when it is up
        if fault.target == EVERYTHING:
            await self._cluster.healthy(RECOVERY_S_MAX)
            return " ".join(self._cluster.last_problems)
        deadline = time.monotonic() + RECOVERY_S_MAX
        while not await self._is_back(fault.target):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{fault.target} is not back: {await self._cluster.problems()}")
            await asyncio.sleep(0.3)
        harms_disk = self._cluster.topology.kinds[fault.kind].harms_disk
        return await self._repaired(fault.target) if harms_disk else ""

    async def _repaired(self, node: str) -> str:
        """Wait until a node that lost synced bytes has applied all metalog entries of that time,
        and nothing is missing; return what was wrong last.
        """
        await asyncio.sleep(FIGURES_S)
        deadline = time.monotonic() + RECOVERY_S_MAX
        while await self._cluster.position_of(node) < self._positions[node]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{node} has not applied {self._positions[node]} entries")
            await asyncio.sleep(0.3)
        await self._cluster.healthy(REPAIR_S_MAX)
        return " ".join(self._cluster.last_problems)

    async def _is_back(self, node: str) -> bool:
        """Return whether a node runs, not in a process that was killed, and a gateway hears it."""
        pid = self._cluster.pid_of(node)
        if pid is None or pid == self._killed.get(node):
            return False
        nodes = self._cluster.nodes_of(node)
        for gateway in range(len(self._cluster.urls)):
            cluster = await self._cluster.seen_by(gateway)
            if cluster is None:
                if node == self._cluster.topology.gateways[gateway]:
                    return False
            elif cluster.up(nodes) == nodes:
                return True
        return False

    # --- processes

    async def _kill(self, fault: Fault) -> str:
        pid = self._killed[fault.target] = self._cluster.signal(fault.target, signal.SIGKILL)
        return f"process {pid}"

    async def _stop(self, fault: Fault) -> str:
        pid = self._cluster.signal(fault.target, signal.SIGSTOP)
        await asyncio.sleep(fault.length_s)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):  # the supervisor replaced it
                os.kill(pid, signal.SIGCONT)
        return f"process {pid} for {fault.length_s:.1f} s"

    async def _kill_everything(self, _: Fault) -> str:
        self._cluster.kill_everything()
        return "all processes but those that restart them"

    async def _kill_helper(self, fault: Fault) -> str:
        await self._cluster.kill(fault.target)
        await asyncio.sleep(fault.length_s)
        await self._cluster.start_again(fault.target)
        return f"started again after {fault.length_s:.1f} s"

    async def _kill_worker(self, fault: Fault) -> str:
        workers = self._cluster.workers_of(fault.target)
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return f"processes {workers}"

    # --- the network

    async def _part(self, fault: Fault) -> str:
        return await self._parted(fault, "both")

    async def _part_one_side(self, fault: Fault) -> str:
        return await self._parted(fault, "in" if fault.variant & 2 else "out")

    async def _parted(self, fault: Fault, direction: Direction) -> str:
        cut = bool(fault.variant & 1)
        with self._proxies.parted(fault.target, direction, cut=cut):
            await asyncio.sleep(fault.length_s)
        how = "connections break" if cut else "connections stay"
        return f"{direction}, {how}, for {fault.length_s:.1f} s"

    # --- disks

    async def _stopped_for_harm(self, node: str) -> int | None:
        """Stop a node whose disk is about to be harmed; return its process, which is to be killed.

        Note how many metalog entries there are.
        """
        pid = self._killed[node] = self._cluster.signal(node, signal.SIGSTOP)
        self._positions[node] = max(
            [await self._cluster.position_of(n) for n in self._cluster.topology.disks]
        )
        return pid

    async def _wipe(self, fault: Fault) -> str:
        pid = await self._stopped_for_harm(fault.target)
        folder = self._cluster.folder_of(fault.target)
        for path in list(folder.iterdir()):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return f"process {pid} killed"

    async def _flip(self, fault: Fault) -> str:
        """Flip a bit of a closed segment; without one it is a kill."""
        pid = await self._stopped_for_harm(fault.target)
        where = "no closed segment"
        if closed := _closed_segments(self._cluster.folder_of(fault.target)):
            rng = random.Random(fault.variant)
            where = drawn_bit(rng.choice(closed), rng)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return f"{where}; process {pid} killed"

    async def _fill(self, fault: Fault) -> str:
        disk = self._disks[fault.target]
        await asyncio.to_thread(disk.fill, leave_bytes=MIB // 4)
        await asyncio.sleep(fault.length_s)
        disk.free()
        return f"for {fault.length_s:.1f} s"

    async def _slow(self, fault: Fault) -> str:
        pid = self._cluster.pid_of(fault.target)
        async with _traced(pid, f"inject=fdatasync:delay_enter={_SYNC_DELAY_US}") as said:
            await asyncio.sleep(fault.length_s)
        return f"process {pid}, {_SYNC_DELAY_US / 1e6:g} s each, for {fault.length_s:.1f} s{said}"

    async def _fail_sync(self, fault: Fault) -> str:
        pid = self._cluster.pid_of(fault.target)
        async with _traced(pid, "inject=fdatasync:error=EIO") as said:
            await asyncio.sleep(fault.length_s)
        return f"process {pid} for {fault.length_s:.1f} s{said}"

    # --- the clock

    async def _jump(self, fault: Fault) -> str:
        ahead_s = AHEAD_S[fault.variant % len(AHEAD_S)]
        self._cluster.set_clock(ahead_s)
        try:
            await asyncio.sleep(fault.length_s)
        finally:
            self._cluster.set_clock(0.0)
        return f"{ahead_s:+,.0f} s, for {fault.length_s:.1f} s"


def _closed_segments(folder: Path) -> list[Path]:
    """Return the segments of a journal before the newest that have bytes."""
    paths = [segment_path(folder, number) for number in segment_numbers(folder)[:-1]]
    return [path for path in paths if path.is_file() and path.read_bytes().rstrip(b"\0")]


def can_trace() -> bool:
    """Return whether system calls of processes can be delayed and failed here."""
    return shutil.which("strace") is not None


@contextlib.asynccontextmanager
async def _traced(pid: int | None, injected: str) -> AsyncIterator[str]:
    """Let strace inject into a process while the block runs; yield its objection, if any."""
    if pid is None:
        yield ", which did not run"
        return
    command = ["strace", "-f", "-p", str(pid), "-e", "trace=fdatasync", "-e", injected]
    tracer = await asyncio.create_subprocess_exec(
        *command, "-o", "/dev/null", stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert tracer.stderr is not None
    try:
        line = (await tracer.stderr.readline()).decode().strip()
        yield "" if "attached" in line else f": {line}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            tracer.kill()  # at SIGTERM, strace waits for a process that ends, and hangs
        await tracer.communicate()
