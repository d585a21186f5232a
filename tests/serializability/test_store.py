"""Random transactions are strictly serializable, and the check detects stores whose transactions
are not.

50,000 transactions: `pytest tests/serializability --transactions 50000 --timeout 3600`.
"""

from __future__ import annotations

from itertools import combinations_with_replacement

import pytest

from bokistore import Store
from bokistore.records import ConflictCheck, StoreCommand
from bokistore.replay import ObjectReplay
from indilog.base.ids import MAX_SEQNUM
from indilog.base.log import Session
from indilog.testing import cluster
from indilog.testing.stepper import interleavings
from tests.serializability.workload import ROUND, SESSIONS, Steps, pair_of, round_of, round_on

TRANSACTIONS = 3000
PLANTED_ROUNDS = 20
PLATFORM_ROUNDS = 5


@pytest.mark.heavy
def test_random_transactions_are_strictly_serializable(transactions_wanted: int | None) -> None:
    for seed in range(-(-(transactions_wanted or TRANSACTIONS) // ROUND)):
        assert not round_of(seed), f"round_of({seed})"


@pytest.mark.asyncio
async def test_random_transactions_on_the_platform_are_strictly_serializable() -> None:
    """Real reads, of sessions that lag behind each other, during collections."""
    async with cluster() as client:
        for seed in range(PLATFORM_ROUNDS):
            logs = [client._logs.log(f"round-{seed}", Session()) for _ in range(SESSIONS)]
            assert not await round_on(logs, seed), f"seed {seed}"


def found() -> list[str]:
    """Return the findings of the first round that has any; empty: no round has."""
    return next(filter(None, map(round_of, range(PLANTED_ROUNDS))), [])


def test_the_check_detects_snapshot_isolation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the writes of a transaction are validated, as in Boki: write skew (PITFALLS 11)."""
    right = StoreCommand.checks

    def written(command: StoreCommand) -> list[ConflictCheck]:
        return [check for check in right(command) if command.concerns(check)]

    monkeypatch.setattr(StoreCommand, "checks", written)
    assert found()[0].startswith("cycle")


def test_the_check_detects_lost_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    async def effective(*_: object) -> bool:
        return True

    monkeypatch.setattr(ObjectReplay, "is_committed", effective)
    monkeypatch.setattr(ObjectReplay, "_is_effective", effective)
    assert any(line.startswith("lost") for line in found())


def test_the_check_detects_reads_of_different_states(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ObjectReplay.view

    async def newest(self: ObjectReplay, name: str, *_: int, may_append: bool = False) -> object:
        return await right(self, name, MAX_SEQNUM, may_append=may_append)

    async def nothing(*_: object, **__: object) -> None:
        """Collect nothing: by views of another state it would trim undecided records."""

    monkeypatch.setattr(ObjectReplay, "view", newest)
    monkeypatch.setattr(Store, "collect", nothing)
    assert found()


def test_the_check_detects_an_aborted_transaction_with_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def effective(*_: object) -> bool:
        return True

    monkeypatch.setattr(ObjectReplay, "_is_effective", effective)
    assert found()


PROGRAMS: tuple[Steps, ...] = (
    (("read", "x"), ("push", "y")),
    (("read", "y"), ("push", "x")),
    (("append", "x"),),
    (("append", "y"), ("append", "x")),
    (("push", "x"), ("push", "y")),
    (("read", "x"), ("read", "y")),
)


@pytest.mark.parametrize("programs", tuple(combinations_with_replacement(PROGRAMS, 2)), ids=str)
def test_two_transactions_are_serializable_in_every_interleaving(
    programs: tuple[Steps, Steps],
) -> None:
    committed = set()
    for wrong, count in interleavings(lambda choose: pair_of(programs, choose)):
        assert not wrong
        committed.add(count)
    assert 2 in committed, "both commit in a serial order"
    assert 0 not in committed, "one of two conflicting transactions commits"


def test_the_stepper_finds_write_skew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreCommand, "checks", lambda _: [])
    outcomes = interleavings(lambda choose: pair_of(PROGRAMS[:2], choose))
    assert any(wrong for wrong, _ in outcomes)
