"""One simulated run: a seed draws a cluster, a workload and faults; what happened is checked."""

from __future__ import annotations

import asyncio
import dataclasses
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from indilog.client import Client
from indilog.envelope import WIRE_VERSION, Envelope, envelope_decoded, envelope_encoded
from indilog.errors import IndilogError, TrimmedError
from indilog.ids import Epoch, NodeId, ShardId, names_decoded
from indilog.log import Record
from indilog.messages import ReadRecords, RecordsRead
from indilog.metalog import entry_encoded
from indilog.testing.simulation import SimulatedCluster, Stuck, World
from ordering.sequencer import Sequencer
from tests.simulation import arrangement, checkers, faults
from tests.simulation.history import Evidence, Operation, Seen, Violation
from tests.simulation.workload import BATCH_MAX, LOGS, Workload

OPERATIONS: Final = 250
"""Operations of a run, about."""
_DURATION_S_MAX: Final = 20.0
_HEALED_WITHIN_S: Final = 30.0
"""After healing everything must work again within so many simulated seconds (liveness)."""
_LAST_FAULTS_S: Final = 0.01
"""So long after healing a sync that failed before it may still end a process."""
_TICK_S: Final = 0.02
_WOKEN_WITHIN_S: Final = 5.0
"""A read that waits for a record has it so soon after the record came, when nothing is wrong."""
_WAITING_S: Final = 0.5
_REPAIR_S: Final = 0.5
"""How long what a replica lacks is waited for before it is asked again."""
_AGAIN_S: Final = 0.05
"""After this a call that was refused is made again."""
_PAGE: Final = 200


@dataclasses.dataclass
class Report:
    """What came of one seed.

    Attributes:
        digest: a hash of all that happened; equal for two runs of one seed.
        violations: what contradicts the promises; empty: the run is clean.
    """

    seed: int
    digest: str = ""
    violations: list[Violation] = dataclasses.field(default_factory=list)
    operations: int = 0
    acknowledged: int = 0
    unknown: int = 0
    records: int = 0
    faults: dict[str, int] = dataclasses.field(default_factory=dict)
    frames_lost: int = 0
    simulated_s: float = 0.0
    steps: int = 0
    arrangement: str = ""
    history: list[Operation] = dataclasses.field(default_factory=list)

    def told(self) -> str:
        """Return what to do with a run that failed."""
        lines = [f"seed {self.seed}: {v.check}: {v.what}" for v in self.violations[:5]]
        return "\n".join(
            [*lines, self.arrangement, f"replay: python -m tests.simulation --seed {self.seed}"]
        )


class Run:
    """One seed's run."""

    def __init__(self, seed: int, *, lines: list[str] | None = None, quiet: bool = False) -> None:
        self.report = Report(seed)
        self._quiet = quiet
        self._metalog: list[bytes] = []
        self._tails = [0]
        self._arrangement: arrangement.Arrangement | None = None
        self._lines = lines

    def run(self) -> Report:
        """Run it to its end and check what happened."""
        report = self.report
        chance = World(report.seed).chance("arrangement")
        drawn = arrangement.drawn(chance)
        report.arrangement = drawn.told()
        with SimulatedCluster(
            report.seed,
            drawn.config,
            arrangement=drawn.processes,
            lines=self._lines,
            segment_bytes=drawn.segment_bytes,
        ) as cluster:
            workload = Workload(
                cluster, chance, operations=OPERATIONS, sessions=chance.randint(1, 5)
            )
            kinds, mean_s = ((), 1.0) if self._quiet else faults.drawn(chance)
            try:
                self._play(cluster, workload, kinds, mean_s)
            except (AssertionError, IndilogError) as error:
                check = "liveness" if isinstance(error, Stuck | IndilogError) else "invariant"
                report.violations.append(Violation(check, f"{type(error).__name__}: {error}"))
            self._sum_up(cluster, workload)
        return report

    def _play(
        self, cluster: SimulatedCluster, workload: Workload, kinds: tuple[str, ...], mean_s: float
    ) -> None:
        world = cluster.world
        for process in list(cluster.processes):
            workload.attach(process)
        chaos = faults.Chaos(cluster, kinds, mean_s)
        self.report.faults = chaos.injected
        end_s = world.now_s + _DURATION_S_MAX
        moving = world.chance("moving")
        while workload.goes_on() and world.now_s < end_s:
            world.run_for(_TICK_S)
            cluster.check_invariants()
            self._check_limits(cluster)
            self._note_metalog(cluster)
            workload.move_homeless(moving)
        workload.stopped = True
        chaos.end()
        evidence = _Aftermath(cluster, workload, self).gathered()
        self.report.violations += checkers.checked(evidence)
        self.report.records = len(evidence.records)

    def _check_limits(self, cluster: SimulatedCluster) -> None:
        """See that no more waits than the configuration allows (a batch goes in whole)."""
        limit = cluster.config.node.append_pending_max + BATCH_MAX
        for process in cluster.processes:
            for node, logs in process.logs.items():
                pending = logs.engine.status()["progress"]["appends_pending"]
                if pending > limit:
                    what = f"{pending} appends wait at {node}, {limit} are allowed"
                    raise AssertionError(what)

    def _note_metalog(self, cluster: SimulatedCluster) -> None:
        """Keep a copy of what the primary calls committed, and may have said: it must not change.

        While a sync runs the primary may be ahead of its disk; then nobody has heard of it yet.
        """
        process = cluster.process_of(cluster.view.primary)
        if process.shell is None or process.shell.holding or process.failing:
            return
        primary = process.shell.roles[cluster.view.primary]
        assert isinstance(primary, Sequencer)
        self.compare_metalog(primary, "the primary")
        for entry in primary._metalog.page(len(self._metalog), primary.committed):
            self._metalog.append(entry_encoded(entry))
            self._tails.append(self._tails[-1] + sum(entry.counts.values()))

    def compare_metalog(self, sequencer: Sequencer, who: str, start: int | None = None) -> None:
        """Compare a sequencer's last entries (or all) with what was committed."""
        known = len(self._metalog)
        start = max(0, known - 64) if start is None else start
        entries = sequencer._metalog.page(start, known)
        for position, entry in enumerate(entries, start):
            if entry_encoded(entry) != self._metalog[position]:
                what = f"{who} has another entry at {position} than was committed: {entry}"
                self.report.violations.append(Violation("metalog", what))
                return

    def finish_metalog(self, cluster: SimulatedCluster) -> list[int]:
        """Compare all sequencers' copies; return the tail after each position."""
        self._note_metalog(cluster)
        for node in cluster.view.sequencers:
            shell = cluster.process_of(node).shell
            assert shell is not None, "healed"
            sequencer = shell.roles[node]
            assert isinstance(sequencer, Sequencer)
            self.compare_metalog(sequencer, node, start=0)
        return self._tails

    def shard_of(self, cluster: SimulatedCluster) -> list[ShardId]:
        """Return the shard of each seqnum, from the committed entries."""
        process = cluster.process_of(cluster.view.primary)
        assert process.shell is not None, "healed"
        primary = process.shell.roles[cluster.view.primary]
        assert isinstance(primary, Sequencer)
        shards: list[ShardId] = []
        for entry in primary._metalog.page(0, primary.committed):
            for shard in sorted(entry.counts):
                shards += [shard] * entry.counts[shard]
        return shards

    def _sum_up(self, cluster: SimulatedCluster, workload: Workload) -> None:
        report, world = self.report, cluster.world
        report.digest = cluster.digest
        report.operations = len(workload.history)
        report.acknowledged = sum(o.outcome == "ok" for o in workload.history)
        report.unknown = sum(o.outcome == "unknown" for o in workload.history)
        report.frames_lost = cluster.network.frames_lost
        report.simulated_s = world.now_s - 1_700_000_000.0
        report.steps = world.steps
        report.history = workload.history
        report.violations += [
            Violation("error", f"{type(error).__name__}: {error}") for error in workload.errors
        ]
        report.violations += [
            Violation("crash", f"{process.name}: {type(error).__name__}: {error}")
            for process in cluster.processes
            for error in process.failures
            if not isinstance(error, OSError)
        ]


def run_seed(seed: int) -> Report:
    """Run one seed; a fault of the simulator itself is a violation as well."""
    try:
        report = Run(seed).run()
    except Exception:  # noqa: BLE001 it is reported, with its seed
        report = Report(seed)
        report.violations.append(Violation("simulator", traceback.format_exc()))
    report.history = []
    return report


class _Prober:
    """Asks storage nodes for records itself; a process of the network, the last one to speak."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.name = "prober"
        self.nodes = (NodeId("prober"),)
        self.answers: dict[int, RecordsRead] = {}
        self._cluster = cluster
        self._stands_for = cluster.view.engines[0]
        """A node unknown to the view would not be heard."""
        self._epoch = Epoch(cluster.next_epoch())
        cluster.network.settle(self)  # type: ignore[arg-type] # it is no process, and needs no more

    def receive(self, sender: str, frame: bytes) -> None:
        """Take in an answer."""
        for message in envelope_decoded(frame).messages:
            if isinstance(message, RecordsRead):
                self.answers[message.request] = message

    def records(self, replica: NodeId, shard: ShardId, seqnums: Sequence[int]) -> RecordsRead:
        """Return what a replica shows at some seqnums."""
        cluster = self._cluster
        request = len(self.answers) + 1
        wanted = ReadRecords(request, self.nodes[0], shard, tuple(seqnums))
        envelope = Envelope(
            WIRE_VERSION, cluster.view.number, self._epoch, self._stands_for, replica, (wanted,)
        )
        cluster.network.carry(self.name, replica, envelope_encoded(envelope))
        cluster.world.run_until(lambda: request in self.answers, _HEALED_WITHIN_S)
        return self.answers[request]


def _remembered(history: Sequence[Operation]) -> dict[int, tuple[str, bytes, tuple[str, ...]]]:
    """Return the records that callers were told of: they may be trimmed by now."""
    records: dict[int, tuple[str, bytes, tuple[str, ...]]] = {}
    for operation in history:
        if operation.outcome != "ok" or not isinstance(operation.value, list | tuple):
            continue
        if operation.entries:
            for seqnum, (data, tags) in zip(operation.value, operation.entries, strict=True):
                records[seqnum] = (operation.log, data, tags)
        else:
            for seen in operation.value:
                records.setdefault(seen.seqnum, (operation.log, seen.data, seen.tags))
    return records


class _Aftermath:
    """What is looked at when everything has healed: that it works again, and what is there."""

    def __init__(self, cluster: SimulatedCluster, workload: Workload, run: Run) -> None:
        self._cluster = cluster
        self._workload = workload
        self._run = run
        self._scans: dict[tuple[str, str], list[Seen]] = {}
        self._unknown: list[tuple[str, int]] = []

    def gathered(self) -> Evidence:
        """Return the evidence.

        Raises:
            Stuck: the cluster does not work again.
        """
        cluster = self._cluster
        cluster.world.run_for(_LAST_FAULTS_S)
        cluster.world.run_until(cluster.ready, _HEALED_WITHIN_S)
        position = 0
        for engine, node in enumerate(cluster.view.engines):
            position = max(
                position, cluster.run(self._works(node), engine=engine, within_s=_HEALED_WITHIN_S)
            )
        position = max(position, self._waiting_ends())
        for engine, node in enumerate(cluster.view.engines):
            cluster.run(self._scan(node, position), engine=engine, within_s=_HEALED_WITHIN_S)
        cluster.world.run_for(0.5)
        cluster.check_invariants()
        tails = self._run.finish_metalog(cluster)
        shown = self._replicas_agree(tails[-1])
        records = _remembered(self._workload.history) | shown
        return Evidence(
            self._workload.history,
            records,
            tails,
            self._scans,
            frozenset(shown),
            tuple(self._unknown),
        )

    def _waiting_ends(self) -> int:
        """Wait at every engine for the next record, append it, see everybody woken."""
        cluster = self._cluster
        waiting = [self._waiting(node) for node in cluster.view.engines]
        cluster.world.run_for(_WAITING_S)
        assert not any(task.done() for task in waiting), "there is nothing yet to wake them"
        position = cluster.run(self._works(cluster.view.engines[0]), within_s=_HEALED_WITHIN_S)
        for task in waiting:
            cluster.world.run_until(task.done, _WOKEN_WITHIN_S)
            assert task.result() is not None, "what was waited for has come"
        return position

    def _waiting(self, node: NodeId) -> asyncio.Task[Record | None]:
        process = self._cluster.process_of(node)
        log = Client(process.logs[node]).log(LOGS[0])

        async def wait() -> Record | None:
            return await log.read_next(None, await log.tail(), wait=_HEALED_WITHIN_S)

        return self._cluster.call(process, wait)

    def _works(self, node: NodeId) -> Callable[[Client], Awaitable[int]]:
        """Append and read at an engine; give the session's position."""

        async def works(client: Client) -> int:
            for kind in ("append", "tail"):
                while not await self._once(kind, node, client):  # noqa: ASYNC110 it asks again
                    await asyncio.sleep(_AGAIN_S)
            return int(client.session.position)

        return works

    async def _once(self, kind: str, node: NodeId, client: Client) -> bool:
        operation = self._workload.begin(self._workload.callers[0], LOGS[0])
        operation.engine, operation.kind, operation.overlapping = node, kind, True
        if kind == "append":
            operation.entries = ((b"%d.last" % operation.number, ()),)
        await self._workload.perform(operation, client.log(LOGS[0]), client.session)
        return operation.outcome == "ok"

    def _scan(self, node: NodeId, position: int) -> Callable[[Client], Awaitable[None]]:
        async def scan(client: Client) -> None:
            client.session.saw(position)
            for name in LOGS:
                log, bound, found = client.log(name), 0, []
                while True:
                    try:
                        page = await log.read_range(None, bound, limit=_PAGE)
                    except TrimmedError as error:
                        bound = error.first_seqnum
                        continue
                    if not page:
                        break
                    found += [Seen(r.seqnum, r.data, tuple(map(str, r.tags))) for r in page]
                    bound = page[-1].seqnum + 1
                self._scans[node, name] = found

        return scan

    def _replicas_agree(self, tail: int) -> dict[int, tuple[str, bytes, tuple[str, ...]]]:
        """Ask every replica for all of its records; they must be the same."""
        cluster = self._cluster
        records: dict[int, tuple[str, bytes, tuple[str, ...]]] = {}
        prober = _Prober(cluster)
        shards = self._run.shard_of(cluster)
        assert len(shards) == tail, "all records are committed"
        for shard, placement in cluster.view.shards.items():
            seqnums = [seqnum for seqnum, of in enumerate(shards) if of == shard]
            for replica in placement.replicas:
                for record in self._all_of(prober, replica, shard, seqnums):
                    log, tags = names_decoded(record.names)
                    shown = (log, record.data, tuple(map(str, tags)))
                    if records.setdefault(record.seqnum, shown) != shown:
                        what = f"{replica} has {shown} at {record.seqnum}, another replica not"
                        self._run.report.violations.append(Violation("replicas", what))
        return records

    def _all_of(
        self, prober: _Prober, replica: NodeId, shard: ShardId, seqnums: list[int]
    ) -> list[Any]:
        found: list[Any] = []
        repaired_by_s = self._cluster.world.now_s + _HEALED_WITHIN_S
        while seqnums:
            page = prober.records(replica, shard, seqnums[:_PAGE])
            if page.unknown and self._cluster.world.now_s < repaired_by_s:
                self._cluster.world.run_for(_REPAIR_S)
                continue
            self._unknown += [(replica, seqnum) for seqnum in page.unknown]
            done = {record.seqnum for record in page.records}
            done.update(page.unknown, page.trimmed)
            if not done:
                raise Stuck(f"{replica} answers nothing about {seqnums[:10]}")
            found += page.records
            seqnums = [seqnum for seqnum in seqnums if seqnum not in done]
        return found
