"""How much of a shared resource one application may use (docs/decisions/0033).

The resources are places for calls (`workers.dispatch`), for recorded invocations
(`invocations.admission`) and for callers that wait for outcomes (`invocations.outcome_waiters`).
"""

from __future__ import annotations


def limit_of_one(share: float, total: int, others: int, *, is_shared: bool) -> int:
    """Return how many units of `total` one application may use.

    Args:
        share: the part of the free units that one application may use, between 0 and 1.
        total: all units of the resource.
        others: the units that the other applications use now; the rest of `total` is free.
        is_shared: whether several applications are deployed. If not, the application may use all
            free units. If so, it may always use at least 1 unit.
    """
    left = total - others
    return max(1, int(share * left)) if is_shared else left
