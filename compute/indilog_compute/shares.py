"""How much of a shared resource one application may use (docs/decisions/0033)."""

from __future__ import annotations


def limit_of_one(share: float, total: int, others: int, *, is_shared: bool) -> int:
    """Return how much one application may use of `total`, of which the others use `others`.

    While several applications are deployed (`is_shared`), the result is `share` (between 0 and 1)
    of what the others leave, and at least 1. A single application may use all that is left.
    """
    left = total - others
    return max(1, int(share * left)) if is_shared else left
