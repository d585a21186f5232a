"""A run of the nemesis: a cluster, load on it, faults from a seed, and the verdict."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from indilog.base.errors import IndilogError
from tests.cluster.faults.small_disk import SmallDisk
from tests.nemesis.faults import AHEAD_S, RECOVERY_S_MAX, Faults, can_trace
from tests.nemesis.injecting import Injected, Injector
from tests.nemesis.judge import judged_disks
from tests.nemesis.load.workload import Workload
from tests.nemesis.proxies import Proxies
from tests.nemesis.recording import Recorder
from tests.nemesis.tested_cluster import TestedCluster
from tests.nemesis.tested_machines import TestedMachines
from tests.nemesis.tested_processes import TestedProcesses
from tests.simulation.history import Seen

_CLUSTERS: Final[Mapping[str, Callable[[Path, str], TestedCluster]]] = {
    "processes": TestedProcesses,
    "machines": lambda directory, _: TestedMachines(directory),
}
_BELIEVED_S: Final = max(ahead for ahead in AHEAD_S if ahead < 86_400.0)


@dataclass
class Outcome:
    """What happened in a run.

    Attributes:
        seconds: for how long faults were injected.
        pauses: times without a successful append, longest first: seconds, and when the pause began
            (seconds since the first fault).
        left_out: kinds of faults that cannot be injected here.
        proxied_bytes: bytes between nodes that went through the proxies.
    """

    seed: int
    seconds: float
    recorder: Recorder = field(default_factory=Recorder)
    injected: list[Injected] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    proxied_bytes: int = 0


async def run(
    seed: int,
    seconds: float,
    kinds: Collection[str],
    directory: Path,
    topology: str,
    policy: str = "mask",
) -> Outcome:
    """Run load and faults on a new cluster in `directory`, heal everything, and judge.

    `policy`: see `TestedProcesses`.
    """
    outcome = Outcome(seed, seconds)
    cluster = _CLUSTERS[topology](directory, policy)
    proxies, small_disk = Proxies(cluster, directory / "proxy"), cluster.topology.small_disk
    with cluster.small_disk(small_disk) as disk:
        disks = {small_disk: disk} if disk is not None else {}
        possible = _possible(set(kinds), disks)
        outcome.left_out = sorted(set(kinds) - possible)
        outcome.recorder.clock_ahead_s = _BELIEVED_S if "clock jump" in possible else 0.0
        await proxies.start()
        try:
            await cluster.start()
            await cluster.healthy(RECOVERY_S_MAX)
            scan = await _tried(outcome, cluster, Faults(cluster, proxies, disks), possible)
        finally:
            await cluster.stop()
            await proxies.close()
            outcome.proxied_bytes = proxies.bytes
        if scan is not None:
            outcome.violations += judged_disks(cluster.data, scan)
    return outcome


def _possible(kinds: set[str], disks: dict[str, SmallDisk]) -> set[str]:
    """Return the kinds of faults that can be injected here."""
    impossible = set() if disks else {"full disk"}
    return kinds - impossible - (set() if can_trace() else {"slow disk", "failed sync"})


async def _tried(
    outcome: Outcome, cluster: TestedCluster, faults: Faults, kinds: Collection[str]
) -> list[Seen] | None:
    """Load the cluster and inject faults; return the log, None if the cluster did not heal."""
    async with AsyncExitStack() as clients:
        https = [
            await clients.enter_async_context(cluster.http(n)) for n in range(len(cluster.urls))
        ]
        load = Workload(cluster.urls, cluster.token, https, outcome.recorder, outcome.seed)
        try:
            await load.begin()
            injector = Injector(cluster.topology, faults, outcome.seed, kinds)
            injecting = asyncio.create_task(injector.run(outcome.seconds))
            await asyncio.wait({injecting}, timeout=outcome.seconds)
            outcome.pauses = _pauses(outcome.recorder.acknowledged_at, injector.began)
            await load.rest()  # what is repaired now is repaired sooner
            await injecting
            outcome.injected, outcome.violations = injector.injected, injector.failures
            if injector.failures:
                return None
            await cluster.healthy(RECOVERY_S_MAX)
            await load.works_again()
            await load.end()
            violations, scan = await load.judged()
            await cluster.healthy(RECOVERY_S_MAX)  # every copy is there
        except (IndilogError, TimeoutError) as error:
            outcome.violations.append(f"liveness: after healing, {type(error).__name__}: {error}")
            return None
        finally:
            outcome.violations += load.crashes
            await load.close()
        outcome.violations += violations
        return scan


def _pauses(acknowledged_at: list[float], began: float) -> list[tuple[float, float]]:
    """Return the times between acknowledged appends, longest first, and when each began."""
    moments = [began, *sorted(at for at in acknowledged_at if at > began), time.monotonic()]
    return sorted(((b - a, a - began) for a, b in pairwise(moments)), reverse=True)
