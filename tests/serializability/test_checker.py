"""The checker detects each anomaly, and nothing else."""

from __future__ import annotations

from tests.serializability.checker import Transaction, violations


def txn(
    number: int,
    *,
    reads: dict[str, tuple[int, ...]] | None = None,
    writes: dict[str, list[int]] | None = None,
    outcome: str = "committed",
    began: int = 0,
    ended: int = 100,
) -> Transaction:
    return Transaction(number, began, outcome, ended, dict(reads or {}), writes or {})


def test_sequential_transactions_are_accepted() -> None:
    history = [
        txn(0, writes={"x": [1, 2]}, began=0, ended=1),
        txn(1, reads={"x": (1, 2)}, writes={"y": [3]}, began=2, ended=3),
        txn(2, reads={"x": (1, 2), "y": (3,)}, began=4, ended=5),
    ]
    assert not violations(history, {"x": (1, 2), "y": (3,)})


def test_a_lost_update_is_detected() -> None:
    history = [
        txn(0, reads={"x": ()}, writes={"x": [1]}),
        txn(1, reads={"x": ()}, writes={"x": [2]}),
    ]
    assert violations(history, {"x": (2,)})[0].startswith("lost")


def test_write_skew_is_detected() -> None:
    history = [
        txn(0, reads={"x": (), "y": ()}, writes={"x": [1]}),
        txn(1, reads={"x": (), "y": ()}, writes={"y": [2]}),
    ]
    (found,) = violations(history, {"x": (1,), "y": (2,)})
    assert found.startswith("cycle")
    assert found.count("rw(") == 2


def test_a_fractured_read_is_detected() -> None:
    history = [
        txn(0, writes={"x": [1], "y": [2]}),
        txn(1, reads={"x": (1,), "y": ()}),
    ]
    assert violations(history, {"x": (1,), "y": (2,)})[0].startswith("cycle")


def test_a_write_of_an_aborted_transaction_is_detected() -> None:
    history = [txn(0, writes={"x": [1]}, outcome="aborted"), txn(1, reads={"x": (1,)})]
    assert all(found.startswith("dirty") for found in violations(history, {"x": (1,)}))


def test_a_partially_applied_transaction_is_detected() -> None:
    history = [txn(0, writes={"x": [1, 2]}), txn(1, reads={"x": (1,)})]
    assert violations(history, {"x": (1, 2)})[0].startswith("intermediate")


def test_a_read_in_another_order_is_detected() -> None:
    history = [
        txn(0, writes={"x": [1]}),
        txn(1, writes={"x": [2]}),
        txn(2, reads={"x": (2,)}),
    ]
    assert violations(history, {"x": (1, 2)})[0].startswith("order")


def test_a_stale_read_is_detected() -> None:
    """The history is serializable, but not in real time."""
    history = [
        txn(0, writes={"x": [1]}, began=0, ended=1),
        txn(1, reads={"x": ()}, began=2, ended=3),
    ]
    assert violations(history, {"x": (1,)})[0].startswith("cycle")


def test_a_transaction_with_unknown_outcome_may_have_committed_or_not() -> None:
    history = [
        txn(0, reads={"x": ()}, writes={"x": [1]}, outcome="unknown"),
        txn(1, reads={"x": ()}, writes={"x": [2]}, outcome="unknown"),
    ]
    assert not violations(history, {"x": (1,)})
    assert not violations(history, {"x": ()})
    assert violations(history, {"x": (1, 2)})
    both = [txn(0, writes={"x": [1], "y": [2]}, outcome="unknown")]
    assert not violations(both, {"x": (1,), "y": (2,)})
    assert violations(both, {"x": (1,), "y": ()})[0].startswith("lost")
