"""A whole cluster in one thread, with simulated clock, network and disks, replayed from a seed.

The code under test is real: the shell, the journal, all roles, and `LocalLog` for callers. Only the
parts below are simulated: the event loop (`world`), the network between processes (`network`), what
a disk keeps over a power loss (`disk`). The same seed gives the same run, byte by byte, on every
machine and in every process (`SimulatedCluster.digest`). See ARCHITECTURE 5 and decision 0013.

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
