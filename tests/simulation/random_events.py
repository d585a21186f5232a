"""What happens at random instants of a simulated run, beside the faults of `faults`.

Each kind has its own random source: without one kind, the rest of a seed's run stays the same.
"""

from __future__ import annotations

from indilog.testing.simulation import SimulatedCluster


class RandomEvents:
    """Lets one kind of event happen at random instants, until `end`.

    A subclass says what happens (`_happen`), and calls `_begin` if its run has such events.

    Args:
        injected: counts the events of the run by kind.
        source: name of the random source.
    """

    def __init__(self, cluster: SimulatedCluster, injected: dict[str, int], source: str) -> None:
        self._cluster = cluster
        self._injected = injected
        self._chance = cluster.world.chance(source)
        self._mean_s = 0.0
        self._over = False

    def end(self) -> None:
        """Let nothing more happen."""
        self._over = True

    def _begin(self, mean_s: float) -> None:
        """Schedule the first event; `mean_s`: simulated seconds between two, on average."""
        self._mean_s = mean_s
        self._schedule()

    def _schedule(self) -> None:
        pause_s = self._chance.expovariate(1 / self._mean_s)
        self._cluster.world.after(pause_s, self._happen_and_schedule)

    def _happen_and_schedule(self) -> None:
        if not self._over:
            self._happen()
            self._schedule()

    def _happen(self) -> None:
        """Change the cluster."""
        raise NotImplementedError

    def _count(self, kind: str, *, traced: bool = True) -> None:
        """Count an event; `traced`: also write it to the trace of the run."""
        self._injected[kind] = self._injected.get(kind, 0) + 1
        if traced:
            self._cluster.world.tell(f"fault: {kind}")
