"""One process: a shell with some roles, which may crash, pause, and restart.

A process runs a real `NodeShell` and `Journal`, on a `ProcessLoop`, a `SimulatedDisk` and a
`SimulatedTransport`. `SimulatedCluster` creates and starts processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from indilog.base.errors import IndilogError
from indilog.base.ids import Epoch, Instant, NodeId
from indilog.config import KIB, Config
from indilog.kernel.view import Members, View
from indilog.roles.role import TermBegun
from indilog.runtime.cluster.assembly import logs_of, retention_of, role_of
from indilog.runtime.journal.journal import Journal
from indilog.runtime.node import Clock, NodeShell
from indilog.testing.simulation.disk import SimulatedDisk
from indilog.testing.simulation.network import SimulatedNetwork, SimulatedTransport
from indilog.testing.simulation.threads import Killed
from indilog.testing.simulation.world import ProcessLoop, World

_UNUSED_SEGMENT_BYTES: Final = 64 * KIB
_GRACE_S: Final = 0.001
"""Seconds for which a failed process continues to run, so that its callers get its errors."""
_RESTART_S: Final = 0.1
"""Seconds until a process that failed, or whose start was refused, is restarted."""


class WorldClock(Clock):
    """The clock of a process: the world's time, plus the error of its machine's wall clock.

    Args:
        world: the source of time.
        wall_ahead_s: seconds by which the wall clock was ahead at the start of the process.
    """

    def __init__(self, world: World, wall_ahead_s: float = 0.0) -> None:
        self._world = world
        self._wall_ahead_s = wall_ahead_s

    def now(self) -> Instant:
        """Return the time."""
        return Instant(self._world.now_s + self._wall_ahead_s)


class Surroundings(Protocol):
    """The state that the processes of a cluster share.

    Attributes:
        config: the configuration of all processes.
        view: the first view.
        stored_view: the view with which processes start.
        members: the nodes that the cluster is to have.
        world: the clock and the scheduler of all processes.
        network: the network between the processes.
        processes: those that belong to the cluster; one that was removed does not start again.
        segment_bytes: size of a journal segment in a process that persists.
    """

    config: Config
    view: View
    stored_view: View
    members: Members
    world: World
    network: SimulatedNetwork
    processes: list[SimulatedProcess]
    segment_bytes: int

    term: TermBegun
    """The newest term."""

    def next_epoch(self) -> int:
        """Return an epoch greater than all earlier ones."""

    def begin_term(self, primary: NodeId, term: Epoch) -> None:
        """Let a node be the primary of a new term; processes learn of it after some time."""


class SimulatedProcess:
    """A process and its disk. A new process is not running.

    Attributes:
        nodes: the nodes whose roles the process runs.
        shell: the shell of the running process; None: the process is down.
        loop: the event loop of the running process, or of its last run.
        logs: the logs of the engines of the running process.
        failures: errors that ended the process: a failed shell, or a refused start.
        replaced: whether another process replaces it, so that it is not restarted when it is down.
        wall_ahead_s: seconds by which its machine's wall clock is ahead; the clock is read at the
            start of the process.
        on_up: called after each start.
    """

    def __init__(
        self,
        cluster: Surroundings,
        name: str,
        nodes: tuple[NodeId, ...],
        disk: SimulatedDisk,
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.nodes = nodes
        self.disk = disk
        self.shell: NodeShell | None = None
        self.loop: ProcessLoop | None = None
        self.logs: dict[NodeId, Any] = {}
        self.failures: list[BaseException] = []
        self.on_up: Callable[[SimulatedProcess], None] = lambda _: None
        self.starts = 0
        self.replaced = False
        self.wall_ahead_s = 0.0
        self._had_journal = False
        self._lost = False
        """Whether the journal was empty at the last start, although it had existed before."""
        self._transport: SimulatedTransport | None = None
        self._chance = cluster.world.chance(f"ends of {name}")

    @property
    def up(self) -> bool:
        """Whether it runs, paused or not."""
        return self.shell is not None

    @property
    def failing(self) -> bool:
        """Whether it has failed and is about to end."""
        return self.shell is not None and self.shell.failed is not None

    @property
    def paused(self) -> bool:
        """Whether it is paused."""
        return self.loop is not None and self.loop.paused

    def start(self) -> None:
        """Start and recover from the disk; does nothing if the process is up or was removed."""
        cluster = self.cluster
        if self.up or self.replaced or self not in cluster.processes:
            return
        world = cluster.world
        self.starts += 1
        self.loop = ProcessLoop(world, f"{self.name}#{self.starts}")  # type: ignore[abstract]
        world.tell(f"{self.name} starts")
        self.loop.on_killed = self._killed
        with self.loop.running():
            try:
                shell = self._shell(Epoch(cluster.next_epoch()))
            except (IndilogError, OSError) as error:
                self._refused(error)
                return
            except Killed:
                self._killed()
                return
            self.shell = shell
            for node in self.nodes:
                if (logs := logs_of(shell, node, cluster.config)) is not None:
                    self.logs[node] = logs
                    retention_of(logs, cluster.config).start()
        cluster.network.settle(self)
        self.on_up(self)

    def _shell(self, epoch: Epoch) -> NodeShell:
        cluster, config = self.cluster, self.cluster.config
        persists = any(node.startswith(("sequencer", "storage")) for node in self.nodes)
        journal = Journal.open(
            self.disk.directory / "journal",
            segment_bytes=cluster.segment_bytes if persists else _UNUSED_SEGMENT_BYTES,
            durability=config.cluster.durability,
        )
        self._transport = SimulatedTransport(cluster.network, self.name)
        shell = NodeShell(
            {node: role_of(node, [cluster.stored_view], config) for node in self.nodes},
            [cluster.stored_view],
            config,
            journal=journal,
            snapshots=self.disk.directory / "snapshots",
            transport=self._transport,
            epoch=epoch,
            on_fatal=self._on_fatal,
        )
        shell.clock = WorldClock(cluster.world, self.wall_ahead_s)
        lost = self._journal_lost(journal)
        if cluster.term.primary in self.nodes:
            cluster.begin_term(cluster.term.primary, epoch)
        shell.start(journal_lost=lost, term=cluster.term if cluster.term.term else None)
        if cluster.members != cluster.view.members:
            shell.want_members(cluster.members)
        return shell

    def learn_of_members(self) -> None:
        """Notify the roles of the nodes that the cluster is to have."""
        if self.shell is not None and self.loop is not None:
            self.loop.call_soon(self.shell.want_members, self.cluster.members)

    def learn_of_term(self) -> None:
        """Notify the roles of the newest term."""
        if self.shell is not None and self.loop is not None:
            self.loop.call_soon(self.shell.begin_term, self.cluster.term)

    def _journal_lost(self, journal: Journal) -> bool:
        """Tell whether the journal was lost, as its record in the metadata store would.

        See `indilog.runtime.cluster.data_directory`.
        """
        self._lost = self._had_journal and (
            journal.created or (self._lost and journal.holds_nothing())
        )
        self._had_journal = True
        return self._lost

    def _killed(self) -> None:
        """End a process that was killed during a sync."""
        loop = self.loop
        self.cluster.world.tell(f"{self.name} is killed during a sync")
        self._end()
        self.disk.keep_pages()
        self.cluster.world.after(_RESTART_S, self._start_again, loop)

    def _refused(self, error: BaseException) -> None:
        self.cluster.world.tell(f"{self.name} does not start: {type(error).__name__}")
        self.failures.append(error)
        self._end()
        self.disk.keep_pages()
        self.cluster.world.after(_RESTART_S, self._start_again, self.loop)

    def _on_fatal(self, error: BaseException) -> None:
        self.cluster.world.tell(f"{self.name} failed: {type(error).__name__}")
        self.failures.append(error)
        loop = self.loop
        self.cluster.world.after(_GRACE_S, self._end_of, loop)

    def _end_of(self, loop: ProcessLoop | None) -> None:
        """End a process that failed, when its threads are done; sometimes the power fails, too."""
        if loop is not None and loop.alive and loop.threads:
            self.cluster.world.after(_GRACE_S, self._end_of, loop)
            return
        if loop is not None and self.loop is loop and loop.alive:
            self._end()
            if self._chance.random() < 0.5:
                self.disk.lose_unsynced()
            else:
                self.disk.keep_pages()
            self.cluster.world.after(_RESTART_S, self._start_again, loop)

    def _start_again(self, loop: ProcessLoop | None) -> None:
        """Restart as a supervisor does, unless the process runs again already."""
        if self.loop is loop:
            self.start()

    def crash(self, *, power: bool) -> None:
        """End at once; with `power`, unsynced writes are lost."""
        if not self.up:
            return
        self.cluster.world.tell(f"{self.name} crashes, power={power}")
        self._end()
        if power:
            self.disk.lose_unsynced()
        else:
            self.disk.keep_pages()

    def _end(self) -> None:
        self.shell = None
        self.logs.clear()
        if self._transport is not None:
            self._transport.close()
        if self.loop is not None:
            self.loop.end()

    def pause(self) -> None:
        """Pause, as a process that the system does not schedule."""
        if self.loop is not None and self.up:
            self.cluster.world.tell(f"{self.name} pauses")
            self.loop.pause()

    def resume(self) -> None:
        """Continue after `pause`."""
        if self.loop is not None and self.loop.paused:
            self.cluster.world.tell(f"{self.name} resumes")
            self.loop.resume()

    def receive(self, sender: str, frame: bytes) -> None:
        """Deliver a frame from the network, unless the process is down."""
        transport, loop = self._transport, self.loop
        if not self.up or transport is None or transport.on_frames is None or loop is None:
            self.cluster.network.frames_lost += 1
            return
        self.cluster.world.tell(f"{sender} > {self.name}", frame)
        loop.call_soon(transport.on_frames, [frame])

    def check_invariants(self) -> None:
        """Check the invariants of all roles, and that no two syncs of one file overlapped."""
        assert not self.disk.overlapping_syncs, "no two syncs of one file overlap"
        if self.shell is not None:
            for role in self.shell.roles.values():
                role.check_invariants()
