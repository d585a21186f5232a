"""Retention policies: how long, and how much of, a log is kept (ARCHITECTURE 13)."""

from __future__ import annotations

from typing import Final

import msgspec

from indilog.base.errors import InvalidTagError

_AGE_S_MAX: Final = 1e12
_SIZE_BYTES_MAX: Final = 2**63 - 1


AGE_S_MIN: Final = 1.0
"""A policy that keeps less would trim what its writer is about to read."""


class Retention(msgspec.Struct, frozen=True):
    """A log's policy; None is no bound, so the default keeps everything.

    Attributes:
        age_s: records that were ordered longer ago than this, in seconds, are trimmed.
        size_bytes: the newest records with this many bytes together (data and names) are kept, and
            always the last one.
    """

    age_s: float | None = None
    size_bytes: int | None = None

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever trimmed."""
        return self.age_s is None and self.size_bytes is None


def checked_retention(log: str, age_s: float | None, size_bytes: int | None) -> Retention:
    """Return the policy if it is valid; all kinds of log use these messages.

    Raises:
        ValueError: a bound is too small, or no number.
        InvalidTagError: `log` is one of the platform's own.
    """
    if log.startswith("$"):
        raise InvalidTagError(f"{log} is a log of the platform, which keeps all of it.")
    if age_s is not None and (
        type(age_s) not in {int, float} or not AGE_S_MIN <= age_s <= _AGE_S_MAX
    ):
        raise ValueError(f"age_s is a number of seconds, {AGE_S_MIN:g} or more, not {age_s!r}.")
    if size_bytes is not None and (
        type(size_bytes) is not int or not 0 < size_bytes <= _SIZE_BYTES_MAX
    ):
        raise ValueError(f"size_bytes is a number of bytes greater than 0, not {size_bytes!r}.")
    return Retention(None if age_s is None else float(age_s), size_bytes)
