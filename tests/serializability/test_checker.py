"""The checker sees each anomaly that it has to, and nothing else."""

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


def test_transactions_one_after_the_other_are_fine() -> None:
    history = [
        txn(0, writes={"x": [1, 2]}, began=0, ended=1),
        txn(1, reads={"x": (1, 2)}, writes={"y": [3]}, began=2, ended=3),
        txn(2, reads={"x": (1, 2), "y": (3,)}, began=4, ended=5),
    ]
    assert not violations(history, {"x": (1, 2), "y": (3,)})


def test_a_lost_update_is_seen() -> None:
    history = [
        txn(0, reads={"x": ()}, writes={"x": [1]}),
        txn(1, reads={"x": ()}, writes={"x": [2]}),
    ]
    assert violations(history, {"x": (2,)})[0].startswith("lost")


def test_write_skew_is_seen() -> None:
    history = [
        txn(0, reads={"x": (), "y": ()}, writes={"x": [1]}),
        txn(1, reads={"x": (), "y": ()}, writes={"y": [2]}),
    ]
    (found,) = violations(history, {"x": (1,), "y": (2,)})
    assert found.startswith("cycle")
    assert found.count("rw(") == 2


def test_a_fractured_read_is_seen() -> None:
    history = [
        txn(0, writes={"x": [1], "y": [2]}),
        txn(1, reads={"x": (1,), "y": ()}),
    ]
    assert violations(history, {"x": (1,), "y": (2,)})[0].startswith("cycle")


def test_a_write_of_an_aborted_transaction_is_seen() -> None:
    history = [txn(0, writes={"x": [1]}, outcome="aborted"), txn(1, reads={"x": (1,)})]
    assert all(found.startswith("dirty") for found in violations(history, {"x": (1,)}))


def test_half_of_a_transaction_is_seen() -> None:
    history = [txn(0, writes={"x": [1, 2]}), txn(1, reads={"x": (1,)})]
    assert violations(history, {"x": (1, 2)})[0].startswith("intermediate")


def test_a_read_in_another_order_is_seen() -> None:
    history = [
        txn(0, writes={"x": [1]}),
        txn(1, writes={"x": [2]}),
        txn(2, reads={"x": (2,)}),
    ]
    assert violations(history, {"x": (1, 2)})[0].startswith("order")


def test_a_read_of_the_past_is_seen() -> None:
    """Serializable, but not in real time."""
    history = [
        txn(0, writes={"x": [1]}, began=0, ended=1),
        txn(1, reads={"x": ()}, began=2, ended=3),
    ]
    assert violations(history, {"x": (1,)})[0].startswith("cycle")


def test_what_is_not_known_may_have_happened_or_not() -> None:
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
