"""A whole cluster in one thread, under a clock, a network and disks that a seed decides
(ARCHITECTURE 5, decision 0013).

What runs is the real thing: the shell, the journal, all roles, and `LocalLog` for callers. Only
below them is everything simulated: the event loop (`world`), the network between processes
(`network`), what a disk keeps when the power goes (`disk`). The same seed gives the same run, byte
by byte, on every machine and in every process (`SimulatedCluster.digest`).

    with SimulatedCluster(seed=7) as cluster:
        async def story(client: Client) -> int:
            return await client.log("orders").append(b"first")

        assert cluster.run(story) == 0

Faults are methods: `crash`, `start`, `pause`, `resume` of a process, `network.cut`, `disk.fill` ...
"""

from indilog.testing.simulation.cluster import SimulatedCluster, arrangement_of
from indilog.testing.simulation.disk import SimulatedDisk
from indilog.testing.simulation.network import LinkQuality, SimulatedNetwork
from indilog.testing.simulation.process import SimulatedProcess
from indilog.testing.simulation.world import Stuck, World

__all__ = [
    "LinkQuality",
    "SimulatedCluster",
    "SimulatedDisk",
    "SimulatedNetwork",
    "SimulatedProcess",
    "Stuck",
    "World",
    "arrangement_of",
]
