"""Scalog's six calls on the log (Scalog 2.1, Table 1): `ScalogLog`.

    from indilog.scalog import ScalogLog, by_key

    log = ScalogLog("orders", client_a, client_b)        # each client at another compute node
    log.set_shard_policy(by_key(lambda data, tags: tags[0]))
    seqnum, shard = await log.append_to_shard(b"...", tags=["customer:7"])
    record = await log.read_record(seqnum, shard)

A compute node appends to one shard. So the live shards are those of the compute nodes to which the
clients are connected, and the policy chooses among them for each record.
"""

from __future__ import annotations

import hashlib
import random  # noqa: TID251 - a client is part of the shell
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

from indilog.base.errors import NotReadyError, SealedError
from indilog.base.ids import SeqNum, ShardId, UserTag
from indilog.base.log import Log, Logs, PlacedSpan, Record

Policy: TypeAlias = Callable[[bytes, Sequence[UserTag], Sequence[ShardId]], ShardId]
"""Returns the shard of a record: one of the live shards.

Arguments: the data of the record, its tags, and the live shards (at least one, ascending).
"""


class PlacedRecord(NamedTuple):
    """Where a record is."""

    seqnum: SeqNum
    shard: ShardId


@runtime_checkable
class _ShardLog(Protocol):
    """What a log of a client can do besides `Log`."""

    async def shard(self) -> ShardId | None:
        """Return the shard that its compute node writes."""

    async def places(self, start: SeqNum, end: SeqNum) -> Sequence[PlacedSpan]:
        """Return the places of records."""


def at_random(_data: bytes, _tags: Sequence[UserTag], shards: Sequence[ShardId]) -> ShardId:
    """Choose any live shard: Scalog's default policy (4.1)."""
    return random.choice(shards)  # noqa: S311 - no secret, and a client is part of the shell


def by_key(key: Callable[[bytes, Sequence[UserTag]], object]) -> Policy:
    """Return the policy of vScalog (5.3): all records with one key go to one shard, so that the
    shard holds the whole object.

    If a shard is finalized or added, only the keys of that shard move (rendezvous hashing).

    Args:
        key: returns the key of a record, from its data and tags; its `str` is hashed.
    """

    def choose(data: bytes, tags: Sequence[UserTag], shards: Sequence[ShardId]) -> ShardId:
        name = str(key(data, tags))
        return max(shards, key=lambda shard: _hash(name, shard))

    return choose


def _hash(name: str, shard: ShardId) -> bytes:
    return hashlib.blake2b(f"{shard} {name}".encode(), digest_size=8).digest()


class ScalogLog:
    """One log with Scalog's calls. Its guarantees are those of `Log`.

    Args:
        name: the log.
        clients: at least one client, each connected to a different compute node. If two are
            connected to one node, appends use the later one.

    Raises:
        ValueError: there is no client, or one that is no client of a platform.
    """

    def __init__(self, name: str, *clients: Logs) -> None:
        self._logs = [client.log(name) for client in clients]
        if not self._logs or not all(isinstance(log, _ShardLog) for log in self._logs):
            raise ValueError("A ScalogLog needs clients of indilog.open or indilog.connect.")
        self._policy: Policy = at_random
        self._by_shard: dict[ShardId, Log] = {}
        """The log that appends to each live shard; empty: the live shards are not known."""

    def set_shard_policy(self, policy: Policy) -> None:
        """Let `policy` choose the shard of each later record (`setShardPolicy`)."""
        self._policy = policy

    async def live_shards(self) -> tuple[ShardId, ...]:
        """Return the shards to which records can be appended now, ascending. This asks all clients.
        Appends use the result until an append finds that the live shards have changed.
        """
        found: dict[ShardId, Log] = {}
        for log in self._logs:
            try:
                shard = await cast("_ShardLog", log).shard()
            except NotReadyError:
                continue  # the compute node has left, or restarts
            if shard is not None:
                found[shard] = log
        self._by_shard = found
        return tuple(sorted(found))

    async def append(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> SeqNum:
        """Append a record to the shard that the policy chooses; return its seqnum (`append`).

        Raises: as `append_to_shard`.
        """
        return (await self._append(data, tuple(tags)))[0]

    async def append_to_shard(self, data: bytes, *, tags: Iterable[UserTag] = ()) -> PlacedRecord:
        """Append a record as `append` does; also return the shard that stores it (`appendToShard`).

        If the chosen shard is finalized meanwhile, its compute node continues on a new shard, and
        stores the record there. If the compute node has left, another shard is chosen, at most once
        for each client.

        Raises:
            NotReadyError: no client's compute node has a shard now; nothing was appended.
            ValueError: the policy chose a shard that is not live; nothing was appended.
            AppendOutcomeUnknownError, TooLargeError and others: as `Log.append`.
        """
        seqnum, log = await self._append(data, tuple(tags))
        return PlacedRecord(seqnum, await self._shard_of(log, seqnum))

    async def _append(self, data: bytes, tags: tuple[UserTag, ...]) -> tuple[SeqNum, Log]:
        """Append a record; return its seqnum, and the log through which it was appended."""
        for _ in self._logs:
            log = await self._log_for(data, tags)
            try:
                return await log.append(data, tags=tags), log
            except (NotReadyError, SealedError):
                self._by_shard.clear()  # nothing was appended
        raise NotReadyError("No compute node of these clients appends now; nothing was appended.")

    async def _log_for(self, data: bytes, tags: tuple[UserTag, ...]) -> Log:
        if not self._by_shard and not await self.live_shards():
            raise NotReadyError("No compute node of these clients has a shard now.")
        shards = tuple(sorted(self._by_shard))
        chosen = self._policy(data, tags, shards)
        if chosen not in self._by_shard:
            raise ValueError(
                f"The policy chose shard {chosen}; live are {', '.join(map(str, shards))}."
            )
        return self._by_shard[chosen]

    async def _shard_of(self, log: Log, seqnum: SeqNum) -> ShardId:
        """Return the shard of a record, and note it if it is a new one."""
        spans = await cast("_ShardLog", log).places(seqnum, seqnum + 1)
        assert spans, "an acknowledged record is ordered"
        if self._by_shard.get(shard := spans[0].shard) is not log:
            self._by_shard.clear()  # the earlier shard was finalized
        return shard

    async def read_record(self, seqnum: SeqNum, shard: ShardId) -> Record | None:
        """Return the record at `seqnum` of this log, which `shard` stores. None proves that there
        is no such record (`readRecord`).

        The compute node that writes the shard is asked, because it may have the record in memory.
        If no client is connected to this node, another node is asked. So a wrong shard only costs
        time. The read sees every record that was acknowledged before it was called.

        Raises:
            TrimmedError, DataLossError and others: as `Log.read`.
        """
        log = self._by_shard.get(shard, self._logs[0])
        return await log.read(seqnum) or await log.read(seqnum, fresh=True)

    def subscribe(self, seqnum: SeqNum = 0) -> AsyncIterator[Record]:
        """Yield the records of all shards from `seqnum` on, in order, and wait for new ones
        (`subscribe`); see `Log.subscribe`.
        """
        return self._logs[0].subscribe(bound=seqnum)

    async def trim(self, seqnum: SeqNum) -> None:
        """Delete the records of this log below `seqnum`, in all shards (`trim`); see `Log.trim`."""
        await self._logs[0].trim(seqnum)
