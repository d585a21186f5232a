"""Objects and state machines over the log, as CORFU's evaluation of its applications (TOCS 2013,
section 4.4, Figures 9 and 10).

Figure 9: callers put, and get, 1 to 10 keys atomically. Gets are linearizable, except those from
the view. The sides are a map of BokiViews, and objects of BokiStore.

Figure 10: 1 to 10 replicas of a state machine propose commands of 512 bytes, and each replica
executes all of them. Each replica has the same number of callers, so the load grows with the
replicas, as in the paper. All replicas share one process here, so the sum of executed commands is
limited by one core. After each round, all replicas must have the same state.

    python -m bench.objects.views [--seconds 2] [--rounds 3] [--callers 64] [--replicas 1 2 4 7 10]
        [--processes]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import tempfile
from collections.abc import Sequence
from statistics import median
from typing import ClassVar, NamedTuple, Self

import msgspec

from bench.support import platforms
from bench.support.harness import (
    Operation,
    Report,
    Round,
    Rounds,
    closed_loop,
    command,
    figures_of,
    interleave,
    ratio_of,
    table_of,
)
from bokistore import Store
from bokiviews import At, Machine, StateMachine, Views
from indilog.base.log import Log

KEYS = (1, 2, 4, 10)
REPLICAS = (1, 2, 4, 7, 10)
VALUE_BYTES = 4096
COMMAND_BYTES = 512
_POPULATION = 1000
_PLACES = 1024


class Execute(msgspec.Struct, array_like=True):
    """A command: 512 bytes for one of the state's places."""

    place: int
    data: bytes


class FixedPlaces(StateMachine[Execute, int]):
    """Fixed places, each with the data of the last command for it; counts commands."""

    kind: ClassVar[str] = "places"
    command_type: ClassVar[object] = Execute

    def __init__(self) -> None:
        self.places = [b""] * _PLACES
        self.executed = 0

    def apply(self, command: Execute, at: At) -> int:
        """Store the data; return the number of commands so far."""
        self.places[command.place] = command.data
        self.executed += 1
        return self.executed

    def snapshot(self) -> object:
        """Return places and count."""
        return list(self.places), self.executed

    @classmethod
    def restore(cls, content: bytes) -> Self:
        """Return the state of a snapshot."""
        state = cls()
        state.places, state.executed = msgspec.msgpack.decode(content, type=tuple[list[bytes], int])
        return state

    @property
    def size(self) -> int:
        """Number of places."""
        return _PLACES

    def digest(self) -> str:
        """Return a digest of the state."""
        return hashlib.sha256(repr((self.places, self.executed)).encode()).hexdigest()


class Replicated(NamedTuple):
    """A round with several replicas.

    Attributes:
        commands_per_s: commands that were proposed and executed everywhere, per second.
        slowest, fastest: commands that the slowest and the fastest replica had executed when the
            proposals ended, as a share of all.
        records: records per command.
        equal: whether all replicas then had the same state.
    """

    commands_per_s: float
    slowest: float
    fastest: float
    records: float
    equal: bool


async def sides_of(log: Log, keys: int, value_bytes: int) -> dict[str, Operation]:
    """Return the operations of Figure 9 for a number of keys, on a filled map and store."""
    names = [f"key-{number}" for number in range(_POPULATION)]
    users = await Views(log, "figure 9").map("keys", bytes)
    store = Store(log)
    filler = bytes(value_bytes)
    text = "x" * value_bytes
    turn = iter(range(1 << 62))

    def chosen() -> list[str]:
        start = next(turn) * keys
        return [names[(start + number) % _POPULATION] for number in range(keys)]

    async def put(_caller: int) -> None:
        await users.update(dict.fromkeys(chosen(), filler))

    async def get(_caller: int) -> None:
        assert len(await users.get_many(chosen())) == keys

    async def local(_caller: int) -> None:
        view = users.view
        assert all(view[key] for key in chosen())

    async def store_put(_caller: int) -> None:
        await store.multi_put({key: {"value": text} for key in chosen()})

    async def store_get(_caller: int) -> None:
        assert all((await store.multi_get(chosen())).values())

    for start in range(0, _POPULATION, 20):
        some = names[start : start + 20]
        await users.update(dict.fromkeys(some, filler))
        await store.multi_put({key: {"value": text} for key in some})
    return {
        "put": put, "get": get, "get from the view": local,
        "BokiStore put": store_put, "BokiStore get": store_get,
    }  # fmt: skip


async def figure_9(asked: argparse.Namespace, report: Report) -> None:
    """Measure atomic puts and gets of several keys."""
    table = table_of(
        f"Figure 9: atomic puts and gets, {asked.value_bytes:,} bytes a value",
        "operation", "keys", "operations/s", "p50", "p99", "CPU", "keys/s relative to 1 key",
        "relative to BokiStore",
    )  # fmt: skip
    single: Rounds = {}
    for keys in asked.keys:  # CORFU's ratios are between numbers of keys
        with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
            config = platforms.configured(path, processes=asked.processes)
            async with platforms.running(config, processes=asked.processes) as bench:
                found = await interleave(
                    await sides_of(bench.log, keys, asked.value_bytes),
                    callers=asked.callers[0], seconds=asked.seconds, rounds=asked.rounds,
                )  # fmt: skip
        single = single or found
        report.add(f"{keys} keys", found)
        for name, rounds in found.items():
            of_one = keys * ratio_of(rounds, single[name], _rate)
            store = found.get(f"BokiStore {name}")
            of_store = "" if store is None else f"{ratio_of(rounds, store, _rate):.1f}"
            table.add_row(name, str(keys), *figures_of(rounds), f"{of_one:.2f}", of_store)
    report.show(table)


def _rate(one: Round) -> float:
    return one.per_second


async def replicas_of(log: Log, group: str, count: int) -> list[Machine[FixedPlaces]]:
    """Open a state machine as several processes would, each with a replica of its own."""
    return [
        await Views(
            log, group, machines=[FixedPlaces], hosts=["places", f"replica {number}"]
        ).machine("places", FixedPlaces)
        for number in range(count)
    ]


async def one_round(
    logs: Sequence[Log], group: str, count: int, *, callers: int, seconds: float
) -> Replicated:
    """Let `callers` propose commands to each of `count` replicas, and let each replica follow."""
    machines = await replicas_of(logs[0], group, count)
    following = [
        asyncio.create_task(
            Views(
                logs[0], group, machines=[FixedPlaces], hosts=["places", f"replica {number}"]
            ).follow()
        )
        for number in range(count)
    ]
    data = bytes(COMMAND_BYTES)
    before = await logs[0].tail()

    async def propose(caller: int) -> None:
        await machines[caller % count].submit(Execute(caller % _PLACES, data))

    proposed = await closed_loop(propose, callers=callers * count, seconds=seconds)
    executed = [machine.view.executed for machine in machines]
    states = [await machine.sync() for machine in machines]
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)
    records = await logs[0].tail() - before
    return Replicated(
        proposed.per_second,
        min(executed) / proposed.operations,
        max(executed) / proposed.operations,
        records / proposed.operations,
        len({state.digest() for state in states}) == 1
        and states[0].executed == proposed.operations,
    )


async def figure_10(asked: argparse.Namespace, report: Report) -> bool:
    """Measure replicated state machines; return whether all replicas always had one state."""
    table = table_of(
        f"Figure 10: replicas of a state machine, {COMMAND_BYTES} bytes a command",
        "replicas", "commands/s", "relative to 1", "executions/s of all", "relative to 1",
        "slowest, fastest replica at the end", "commands/record", "equal states",
    )  # fmt: skip
    rounds: dict[int, list[Replicated]] = {count: [] for count in asked.replicas}
    with tempfile.TemporaryDirectory(prefix="indilog-bench-") as path:
        config = platforms.configured(path, processes=asked.processes)
        async with platforms.running(config, processes=asked.processes) as bench:
            for turn in range(asked.rounds):
                for count in asked.replicas[:: 1 if turn % 2 == 0 else -1]:
                    rounds[count].append(
                        await one_round(
                            bench.logs, f"{turn}/{count}", count,
                            callers=asked.callers[0], seconds=asked.seconds,
                        )
                    )  # fmt: skip
    first = rounds[asked.replicas[0]]
    for count, found in rounds.items():
        pairs = zip(found, first, strict=True)
        ratios = [one.commands_per_s / base.commands_per_s for one, base in pairs]
        rate, ratio = median(one.commands_per_s for one in found), median(ratios)
        table.add_row(
            str(count), f"{rate:,.0f}", f"{ratio:.2f}", f"{rate * count:,.0f}",
            f"{ratio * count / asked.replicas[0]:.2f}",
            f"{median(r.slowest for r in found):.3f}, {median(r.fastest for r in found):.3f}",
            f"{1 / median(r.records for r in found):.1f}",
            "yes" if all(r.equal for r in found) else "no",
        )  # fmt: skip
        report.keep(f"{count} replicas", [one._asdict() for one in found])
    report.show(table)
    return all(one.equal for found in rounds.values() for one in found)


async def main(asked: argparse.Namespace) -> None:
    """Measure both figures."""
    report = Report("views", asked, value_bytes=asked.value_bytes, command_bytes=COMMAND_BYTES)
    await figure_9(asked, report)
    are_equal = await figure_10(asked, report)
    report.write()
    if not are_equal:
        raise SystemExit("The check failed: replicas had different states.")


if __name__ == "__main__":
    command(
        main,
        __doc__,
        callers={"type": int, "nargs": 1, "default": [64]},
        keys={"type": int, "nargs": "+", "default": list(KEYS), "help": "keys per operation"},
        replicas={"type": int, "nargs": "+", "default": list(REPLICAS)},
        value_bytes={"type": int, "default": VALUE_BYTES},
        processes={"action": "store_true", "help": "tiers as processes"},
    )
