"""Checks of the arguments of `Queue` and `Delivery`.

Each check returns or raises `QueueSettingsError`, before anything is appended. The module also has
the defaults and bounds that the checks use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bokiqueue.errors import QueueSettingsError
from bokiqueue.records import ID_CHARACTERS_MAX, SECONDS_MAX

LEASE_S: Final = 30.0
BACKOFF_S: Final = 1.0
BACKOFF_S_MAX: Final = 60.0
"""Longest pause in seconds after a failed block."""
LIMIT_MAX: Final = 256
"""Largest number of messages that one call takes."""
_LEASE_S_MIN: Final = 0.001


def checked_shards(consumes: Sequence[int] | None, shards: int) -> tuple[int, ...] | None:
    """Return numbers of shards in order, each once; None stays None."""
    if consumes is None:
        return None
    numbers = tuple(sorted(set(consumes)))
    if not numbers or not all(type(n) is int and 0 <= n < shards for n in numbers):
        raise QueueSettingsError(
            f"consumes must be numbers of shards, 0 to {shards - 1}, not {consumes!r:.40}."
        )
    return numbers


def check_id(push_id: object) -> None:
    """Check the id of a push; None: the push has no id."""
    if push_id is None:
        return
    if not isinstance(push_id, str) or not 0 < len(push_id) <= ID_CHARACTERS_MAX:
        raise QueueSettingsError(
            f"id must be 1 to {ID_CHARACTERS_MAX:,} characters of text, not {push_id!r:.40}."
        )


def check_seconds(what: str, seconds: object) -> None:
    """Check a number of seconds, up to a year; `what` begins the error message."""
    if not isinstance(seconds, int | float) or not 0 <= seconds <= SECONDS_MAX:
        raise QueueSettingsError(
            f"{what} must be 0 to {SECONDS_MAX:,.0f} seconds, not {seconds!r:.40}."
        )


def check_backoff(backoff: object) -> None:
    """Check the pause after a failed block."""
    if not isinstance(backoff, int | float) or not 0 <= backoff <= BACKOFF_S_MAX:
        raise QueueSettingsError(
            f"backoff must be 0 to {BACKOFF_S_MAX:.0f} seconds, not {backoff!r:.40}; "
            "for longer pauses call requeue(delay=...) in the block."
        )


def check_limit(limit: object) -> None:
    """Check the number of messages to take."""
    if type(limit) is not int or not 1 <= limit <= LIMIT_MAX:
        raise QueueSettingsError(f"limit must be 1 to {LIMIT_MAX} messages, not {limit!r:.40}.")


def check_lease(lease: float) -> None:
    """Check the length of a lease."""
    check_seconds("A lease", lease)
    if lease < _LEASE_S_MIN:
        raise QueueSettingsError(f"lease must be at least {_LEASE_S_MIN} seconds, not {lease}.")
