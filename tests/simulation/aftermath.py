"""What happens after a run, when all faults are healed: liveness is checked, evidence collected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from indilog.base.errors import DataLossError, IndilogError, TrimmedError
from indilog.base.ids import Epoch, NodeId, ShardId, decode_names
from indilog.base.log import Log
from indilog.base.retention import AGE_S_MIN
from indilog.client import Client
from indilog.testing.simulation import SimulatedCluster, Stuck
from indilog.wire.envelope import WIRE_VERSION, Envelope, decode_envelope, encode_envelope
from indilog.wire.messages import ReadRecords, RecordsRead
from tests.simulation.history import APPENDS, Evidence, Operation, Seen, Violation, seen
from tests.simulation.joins import Joins
from tests.simulation.lost_batches import LostBatches
from tests.simulation.lost_storage import Redundancy
from tests.simulation.metalog_notes import MetalogNotes
from tests.simulation.operations import LOGS
from tests.simulation.sequencer_faults import leading
from tests.simulation.workload import Workload

_HEALED_WITHIN_S: Final = 30.0
"""Simulated seconds after healing until all calls must succeed again (liveness)."""
_LAST_FAULTS_S: Final = 0.25
"""Simulated seconds after healing in which an earlier failed sync may still end a process."""
_WOKEN_WITHIN_S: Final = 5.0
"""Simulated seconds from a record to the end of the read that waits for it, without faults."""
_WAITING_S: Final = 0.5
_REPAIR_S: Final = 0.5
"""Simulated seconds between two requests for records that a replica lacks."""
_AGAIN_S: Final = 0.05
"""Simulated seconds until a refused call is repeated."""
_ENFORCED_WITHIN_S: Final = 10.0
"""Simulated seconds until a retention policy is enforced, without faults."""
_PAGE: Final = 200


class _Prober:
    """A process outside the cluster that asks storage nodes for their records after the run."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.name = "prober"
        self.nodes = (NodeId("prober"),)
        self.answers: dict[int, RecordsRead] = {}
        self._cluster = cluster
        self._stands_for = cluster.members.engines[0]
        """The node that it claims to be, because storage nodes ignore messages of unknown nodes."""
        self._epoch = Epoch(cluster.next_epoch())
        cluster.network.settle(self)

    def receive(self, sender: str, frame: bytes) -> None:
        """Keep an answer of a storage node."""
        for message in decode_envelope(frame).messages:
            if isinstance(message, RecordsRead):
                self.answers[message.request] = message

    def records(self, replica: NodeId, shard: ShardId, seqnums: Sequence[int]) -> RecordsRead:
        """Return a replica's answer to a read of `seqnums`."""
        cluster = self._cluster
        request = len(self.answers) + 1
        wanted = ReadRecords(request, self.nodes[0], shard, tuple(seqnums))
        envelope = Envelope(WIRE_VERSION, self._epoch, self._stands_for, replica, (wanted,))
        cluster.network.carry(self.name, replica, encode_envelope(envelope))
        cluster.world.run_until(lambda: request in self.answers, _HEALED_WITHIN_S)
        return self.answers[request]


def _remembered(history: Sequence[Operation]) -> dict[int, tuple[str, bytes, tuple[str, ...]]]:
    """Return the records that callers appended or read, also those that were trimmed since."""
    records: dict[int, tuple[str, bytes, tuple[str, ...]]] = {}
    for operation in history:
        reported = operation.outcome == "ok" and operation.kind != "retention"
        if not reported or not isinstance(operation.value, list | tuple):
            continue
        if operation.entries:
            for seqnum, (data, tags) in zip(operation.value, operation.entries, strict=True):
                records[seqnum] = (operation.log, data, tags)
        else:
            for seen in operation.value:
                records.setdefault(seen.seqnum, (operation.log, seen.data, seen.tags))
    return records


def _behind(error: DataLossError, bound: int) -> int:
    """Return the seqnum after the lost records that `error` reports."""
    assert error.next_seqnum is not None, "the error names the position"
    assert error.next_seqnum > bound, "the error names a requested seqnum"
    return error.next_seqnum


def _ends_with(found: Sequence[Seen], seqnum: int) -> bool:
    return bool(found) and found[-1].seqnum == seqnum


class Aftermath:
    """Checks liveness after healing and collects the evidence for the checkers."""

    def __init__(
        self,
        cluster: SimulatedCluster,
        workload: Workload,
        metalog: MetalogNotes,
        violations: list[Violation],
        batches: LostBatches | None = None,
        joins: Joins | None = None,
    ) -> None:
        self._joins = joins
        self._batches = batches
        self._lost: frozenset[int] = frozenset()
        self._reported_losses: dict[tuple[str, str], list[tuple[int, int]]] = {}
        self._cluster = cluster
        self._workload = workload
        self._metalog = metalog
        self._violations = violations
        self._scans: dict[tuple[str, str], list[Seen]] = {}
        self._subscribed: dict[tuple[str, str], list[Seen]] = {}
        self._subscriptions: list[asyncio.Task[None]] = []
        self._unknown: list[tuple[str, int]] = []
        self._stamps: dict[int, float] = {}

    def gather(self) -> Evidence:
        """Check liveness, and return the evidence.

        Raises:
            Stuck: calls do not succeed again in time.
        """
        cluster = self._cluster
        cluster.world.run_for(_LAST_FAULTS_S)
        cluster.world.run_until(self._nothing_fails, _HEALED_WITHIN_S)
        cluster.heal()  # a sync that failed late has ended a process
        if self._joins is not None:
            self._joins.check(self._violations)
        cluster.world.run_until(cluster.ready, _HEALED_WITHIN_S)
        position = 0
        for engine, node in enumerate(cluster.members.engines):
            position = max(
                position, cluster.run(self._works(node), engine=engine, within_s=_HEALED_WITHIN_S)
            )
        # A caller reads before such an append, and its home may append when the caller is gone.
        cluster.world.run_until(self._without_conditional_appends, _HEALED_WITHIN_S)
        position = max(position, self._waiting_ends())
        for engine, node in enumerate(cluster.members.engines):
            cluster.run(self._scan(node, position), engine=engine, within_s=_HEALED_WITHIN_S)
        cluster.world.run_for(0.5)
        self._unsubscribe()
        cluster.check_invariants()
        tails = self._metalog.finish(cluster)
        if self._batches is not None:
            self._lost = self._batches.seqnums(self._metalog.shard_of(cluster))
        Redundancy(cluster, self._violations).check()
        shown = self._replicas_agree(tails[-1])
        records = self._surviving_records() | _remembered(self._workload.history) | shown
        return Evidence(
            self._workload.history,
            records,
            tails,
            self._scans,
            frozenset(shown),
            tuple(self._unknown),
            self._subscribed,
            self._stamps,
            self._lost,
            self._reported_losses,
            self._metalog.ordered_at(),
        )

    def _surviving_records(self) -> dict[int, tuple[str, bytes, tuple[str, ...]]]:
        return {
            found.seqnum: (log, found.data, found.tags)
            for shown in (self._scans, self._subscribed)
            for (_, log), records in shown.items()
            for found in records
        }

    def enforce_retention(self) -> None:
        """Check that a log becomes empty under the shortest age limit, if the run had policies."""
        workload, cluster = self._workload, self._cluster
        if not any(operation.kind == "set_retention" for operation in workload.history):
            return
        name = workload.habits.logs[0]
        # Storage nodes fence its present incarnation: the prober used its name and a newer epoch.
        process = cluster.process_of(cluster.members.engines[0])
        process.crash(power=False)
        process.start()
        cluster.world.run_until(cluster.ready, _HEALED_WITHIN_S)

        async def enforced(client: Client) -> None:
            log = client.log(name)
            while not await self._policy_set(log):  # noqa: ASYNC110 it asks again
                await asyncio.sleep(_AGAIN_S)
            while await self._all_of_log(log):  # noqa: ASYNC110 it looks again
                await asyncio.sleep(_AGAIN_S)

        cluster.run(enforced, within_s=_ENFORCED_WITHIN_S)

    async def _policy_set(self, log: Log) -> bool:
        try:
            await log.set_retention(age_s=AGE_S_MIN)
        except IndilogError:
            return False
        return True

    def _nothing_fails(self) -> bool:
        return not any(process.failing for process in self._cluster.processes)

    def _without_conditional_appends(self) -> bool:
        if any(caller.is_attached and caller.at_work for caller in self._workload.callers):
            return False
        engines = [logs.engine for p in self._cluster.processes if p.up for logs in p.logs.values()]
        return not any(e.status()["progress"]["conditional_appends_pending"] for e in engines)

    def _waiting_ends(self) -> int:
        """Check that an append ends the waiting reads and subscriptions at every engine.

        Each of them has read the whole log before. Returns the position of the append.
        """
        cluster = self._cluster
        waiting = [self._waiting(node) for node in cluster.members.engines]
        subscribed = [self._subscription(node) for node in cluster.members.engines]
        cluster.world.run_for(_WAITING_S)
        assert not any(task.done() for task in waiting), "no record has been appended yet"
        position = cluster.run(self._works(cluster.members.engines[0]), within_s=_HEALED_WITHIN_S)
        for task in waiting:
            cluster.world.run_until(task.done, _WOKEN_WITHIN_S)
            task.result()
        appends = (o for o in self._workload.history if o.kind in APPENDS and o.outcome == "ok")
        newest = max(operation.value[-1] for operation in appends)
        for found in subscribed:
            cluster.world.run_until(lambda f=found: _ends_with(f, newest), _WOKEN_WITHIN_S)  # type: ignore[misc]
        return position

    def _subscription(self, node: NodeId) -> list[Seen]:
        """Subscribe to all of a log; return a list that grows with each record."""
        found = self._subscribed[node, LOGS[0]] = []
        process = self._cluster.process_of(node)
        log = Client(process.logs[node]).log(LOGS[0])

        async def subscribe() -> None:
            bound = 0
            while True:
                try:
                    async for record in log.subscribe(None, bound):
                        found.append(seen(record))  # noqa: PERF401 the waiting reader looks at it
                except TrimmedError as error:
                    bound = error.first_seqnum
                except DataLossError as error:
                    bound = _behind(error, bound)

        self._subscriptions.append(self._cluster.call(process, subscribe))
        return found

    def _unsubscribe(self) -> None:
        for task in self._subscriptions:
            task.cancel()
            self._cluster.world.run_until(task.done, _HEALED_WITHIN_S)

    def _waiting(self, node: NodeId) -> asyncio.Task[int]:
        process = self._cluster.process_of(node)
        log = Client(process.logs[node]).log(LOGS[0])

        async def wait() -> int:
            bound = await log.tail()
            try:
                found = await log.read_next(None, bound, wait=_HEALED_WITHIN_S)
            except TrimmedError as error:  # the record came, and a policy trimmed it at once
                return error.first_seqnum
            assert found is not None, "each wait ended with a record"
            return found.seqnum

        return self._cluster.call(process, wait)

    def _works(self, node: NodeId) -> Callable[[Client], Awaitable[int]]:
        """Append at an engine and ask for the tail, until both succeed; return the position."""

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
            for name in self._workload.habits.logs:
                reported = self._reported_losses[node, name] = []
                self._scans[node, name] = await self._all_of_log(client.log(name), reported)

        return scan

    async def _all_of_log(self, log: Log, lost: list[tuple[int, int]] | None = None) -> list[Seen]:
        bound, found = 0, list[Seen]()
        while True:
            try:
                page = await log.read_range(None, bound, limit=_PAGE if found else 1)
            except TrimmedError as error:
                bound = error.first_seqnum
                continue
            except DataLossError as error:
                following = _behind(error, bound)
                if lost is not None:
                    lost.append((bound if error.seqnum is None else error.seqnum, following))
                bound = following
                continue
            if not page:
                return found
            found += map(seen, page)
            bound = page[-1].seqnum + 1

    def _replicas_agree(self, tail: int) -> dict[int, tuple[str, bytes, tuple[str, ...]]]:
        """Ask every replica for all of its records; they must be the same."""
        cluster = self._cluster
        records: dict[int, tuple[str, bytes, tuple[str, ...]]] = {}
        prober = _Prober(cluster)
        shards = self._metalog.shard_of(cluster)
        assert len(shards) == tail, "all records are committed"
        primary = leading(cluster)
        assert primary is not None, "the cluster works"
        assert primary._primary is not None, "it leads"
        placement = primary._primary._placement
        for shard in placement.shards:
            seqnums = [seqnum for seqnum, of in enumerate(shards) if of == shard]
            for replica in placement.replicas(shard):
                for record in self._all_of(prober, replica, shard, seqnums):
                    log, tags = decode_names(record.names)
                    shown = (log, record.data, tuple(map(str, tags)))
                    if records.setdefault(record.seqnum, shown) != shown:
                        what = f"{replica} has {shown} at {record.seqnum}, another replica not"
                        self._violations.append(Violation("replicas", what))
                    stamp = record.ordered_us / 1e6
                    if self._stamps.setdefault(record.seqnum, stamp) != stamp:
                        what = f"{replica} has {record.seqnum} ordered at {stamp}, another not"
                        self._violations.append(Violation("replicas", what))
        return records

    def _all_of(
        self, prober: _Prober, replica: NodeId, shard: ShardId, seqnums: list[int]
    ) -> list[Any]:
        found: list[Any] = []
        repaired_by_s = self._cluster.world.now_s + _HEALED_WITHIN_S
        count = _PAGE
        while seqnums:
            page = prober.records(replica, shard, seqnums[:count])
            awaited = set(page.unknown) - self._lost
            if awaited and self._cluster.world.now_s < repaired_by_s:
                self._cluster.world.run_for(_REPAIR_S)
                continue
            self._unknown += [(replica, seqnum) for seqnum in page.unknown]
            done = {record.seqnum for record in page.records}
            done.update(page.unknown, page.trimmed)
            if not done:
                raise Stuck(f"{replica} answers nothing about {seqnums[:10]}")
            count = min(_PAGE, 2 * len(done))  # pages may have one record
            found += page.records
            seqnums = [seqnum for seqnum in seqnums if seqnum not in done]
        return found
