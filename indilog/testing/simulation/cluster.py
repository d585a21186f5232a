"""The simulated cluster: processes, the network between them, and callers.

The package docstring lists the simulated and the real parts. A `SimulatedCluster` creates a
`World`, a `SimulatedNetwork`, and a `SimulatedProcess` with a `SimulatedDisk` for each process.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import structlog

from indilog.base.ids import Epoch, NodeId
from indilog.client import Client
from indilog.config import KIB, ClusterConfig, Config, node_config
from indilog.kernel.view import Members, View, view_of
from indilog.roles.role import TermBegun
from indilog.testing.simulation.disk import SimulatedDisk, installed
from indilog.testing.simulation.network import SimulatedNetwork
from indilog.testing.simulation.process import SimulatedProcess
from indilog.testing.simulation.world import World

_T = TypeVar("_T")

_MEMORY: Final = Path("/dev/shm")  # noqa: S108 a file system in memory, if there is one
READY_WITHIN_S: Final = 60.0
_TERM_DELAYS_S: Final = (0.0, 0.001, 0.02, 0.3)
"""Seconds until a process learns of a new term."""

SMALL: Final = Config(
    cluster=ClusterConfig(
        record_bytes_max=2 * KIB,
        batch_bytes_max=67 * KIB,
        aux_bytes_max=4 * KIB,
        message_bytes_max=256 * KIB,
    ),
    node=node_config(
        segment_bytes=68 * KIB,
        sync_inline_s_max=1e9,
        page_bytes_max=56 * KIB,
        result_bytes_max=56 * KIB,
    ),
)
"""The default configuration: small files, so that a start costs little."""


def arrangement_of(view: View, *, embedded: bool) -> tuple[tuple[NodeId, ...], ...]:
    """Return which nodes share a process: all of them, or none with another."""
    return (view.nodes,) if embedded else tuple((node,) for node in view.nodes)


def view_for(config: Config) -> View:
    """Return the view that a configuration asks for."""
    cluster = config.cluster
    return view_of(
        sequencers=cluster.sequencers,
        storage_nodes=cluster.storage_nodes,
        replicas=cluster.replicas,
        index_shards=cluster.index_shards,
        index_replicas=cluster.index_replicas,
        aggregators=cluster.aggregators,
        engines=cluster.engines,
    )


class SimulatedCluster:
    """A simulated cluster, as a context manager. Use one at a time, in one thread.

    Args:
        seed: determines all random choices.
        config: configuration of the cluster; by default with small files, so that a start is quick.
        arrangement: which nodes share a process; each in its own by default.
        lines: if a list, a line is added to it for each event.
    """

    def __init__(
        self,
        seed: int | str,
        config: Config = SMALL,
        *,
        arrangement: Sequence[tuple[NodeId, ...]] | None = None,
        lines: list[str] | None = None,
        segment_bytes: int | None = None,
    ) -> None:
        """`segment_bytes`: size of the journals' segments, which may be below a configuration's
        limit.
        """
        self.world = World(seed)
        self.world.lines = lines
        self.config = config
        self.segment_bytes = segment_bytes or config.node.journal.segment_bytes
        self.view = view_for(config)
        self.members = self.view.members
        """The nodes that the cluster is to have."""
        self.stored_view = self.view
        """The view with which processes start."""
        self.network = SimulatedNetwork(self.world)
        self.processes: list[SimulatedProcess] = []
        self._arrangement = arrangement or arrangement_of(self.view, embedded=False)
        self.term = TermBegun(Epoch(0), self.view.sequencers[0])
        self._term_chance = self.world.chance("terms")
        self._epochs = itertools.count(1)
        self._names: set[str] = set()
        self._stack = ExitStack()
        self._directory = Path()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(_quiet())
            stack.callback(sys.set_asyncgen_hooks, *sys.get_asyncgen_hooks())
            # A generator of a process that ended must not run its cleanup.
            sys.set_asyncgen_hooks(finalizer=lambda _: None)
            memory = _MEMORY if _MEMORY.is_dir() else None
            directory = tempfile.TemporaryDirectory(prefix="indilog-sim-", dir=memory)
            self._directory = Path(stack.enter_context(directory))
            self._calls = stack.enter_context(installed())
            stack.callback(self._close)
            for nodes in self._arrangement:
                self.add_process(nodes)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def _close(self) -> None:
        for process in self.processes:
            process.crash(power=False)

    @property
    def digest(self) -> str:
        """A hash of all that happened: equal for two runs of one seed."""
        return self.world.digest

    def next_epoch(self) -> int:
        """Return the next epoch, as the metadata store would."""
        return next(self._epochs)

    def begin_term(self, primary: NodeId, term: Epoch) -> None:
        """Make a node the primary of a new term, as the metadata store would. Each process is
        notified after its own delay.
        """
        self.term = TermBegun(term, primary)
        self.world.tell(f"{primary} gets term {term}")
        for process in self.processes:
            delay_s = self._term_chance.choice(_TERM_DELAYS_S)
            self.world.after(delay_s, process.learn_of_term)

    def want_members(self, members: Members) -> None:
        """Set the nodes that the cluster is to have, as the metadata store would. Each process is
        notified after its own delay.
        """
        self.members = members
        self.world.tell(f"the cluster is to have {', '.join(members.nodes)}")
        for process in self.processes:
            delay_s = self._term_chance.choice(_TERM_DELAYS_S)
            self.world.after(delay_s, process.learn_of_members)

    @property
    def storage_nodes(self) -> tuple[NodeId, ...]:
        """The storage nodes of the newest view."""
        return self.stored_view.storage_nodes

    def add_process(self, nodes: tuple[NodeId, ...]) -> SimulatedProcess:
        """Start a further process with a disk of its own."""
        name = "+".join(nodes) if len(nodes) < 3 else f"{nodes[0]}+{len(nodes) - 1}"
        if name in self._names:
            name = f"{name}~{len(self._names)}"
        self._names.add(name)
        disk = SimulatedDisk(self._directory / name, self.world.chance(f"disk of {name}"))
        self._calls.disks.append(disk)
        process = SimulatedProcess(self, name, nodes, disk)
        self.processes.append(process)
        process.start()
        return process

    def remove_process(self, process: SimulatedProcess) -> None:
        """Remove a process that is down from the cluster, permanently."""
        assert not process.up, "only a process that is down is removed"
        self.processes.remove(process)
        self.network.forget(process)

    def process_of(self, node: NodeId) -> SimulatedProcess:
        """Return the first process that has `node`."""
        return next(process for process in self.processes if node in process.nodes)

    # --- callers

    def call(
        self, process: SimulatedProcess, story: Callable[[], Awaitable[_T]]
    ) -> asyncio.Task[_T]:
        """Start a task inside a process that is up; it ends at the latest when the process ends."""
        assert process.loop is not None
        assert process.up, "a process that is down makes no calls"

        async def run() -> _T:
            return await story()

        return process.loop.create_task(run())

    def run(
        self,
        story: Callable[[Client], Awaitable[_T]],
        *,
        engine: int = 0,
        within_s: float = READY_WITHIN_S,
    ) -> _T:
        """Run a story at an engine until it ends.

        Raises:
            Stuck: the story does not end within the simulated seconds.
        """
        node = self.members.engines[engine]
        process = self.process_of(node)
        logs = process.logs[node]
        task = self.call(process, lambda: story(Client(logs)))
        self.world.run_until(task.done, within_s)
        return task.result()

    def ready(self) -> bool:
        """Return whether every engine has joined."""
        homes = [(self.process_of(node), node) for node in self.members.engines]
        return all(p.up and not p.failing and p.logs[node].engine.ready for p, node in homes)

    def heal(self) -> None:
        """End all faults: a perfect network, intact disks, all processes up."""
        self.network.heal()
        for process in self.processes:
            process.disk.full = process.disk.sync_fails = process.disk.overlap_fails = False
            process.disk.syncs_until_killed = None
            process.disk.unreadable = 0.0
            process.resume()
            process.start()

    def check_invariants(self) -> None:
        """Check the invariants of all roles."""
        for process in self.processes:
            process.check_invariants()


class _quiet:  # noqa: N801 a context manager
    """Suppress log lines of the cluster, because it is made to fail."""

    def __enter__(self) -> None:
        self._before: dict[str, Any] | None = (
            structlog.get_config() if structlog.is_configured() else None
        )
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger("critical"))

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            structlog.reset_defaults()
        else:
            structlog.configure(**self._before)
