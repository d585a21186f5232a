"""Retention policies: the age and the size up to which a log's records are kept (ARCHITECTURE 13).

`Log.set_retention` stores a policy, and compute nodes enforce it (`indilog_compute.retention`).
"""

from __future__ import annotations

from typing import Final

import msgspec

from indilog.base.errors import InvalidTagError

_AGE_S_MAX: Final = 1e12
_SIZE_BYTES_MAX: Final = 2**63 - 1


AGE_S_MIN: Final = 1.0
"""Smallest `age_s`, in seconds. A shorter age would trim records that a reader is about to read."""


class Retention(msgspec.Struct, frozen=True):
    """A log's retention policy. A bound of None is no bound, so the default keeps everything.

    Attributes:
        age_s: records that were ordered more than `age_s` seconds ago are trimmed.
        size_bytes: total bytes (data and names) of the newest records that are kept. The last
            record is always kept.
    """

    age_s: float | None = None
    size_bytes: int | None = None

    @property
    def keeps_all(self) -> bool:
        """Whether the policy trims nothing."""
        return self.age_s is None and self.size_bytes is None


def checked_retention(log: str, age_s: float | None, size_bytes: int | None) -> Retention:
    """Return the policy if it is valid. All implementations of a log use this check.

    Raises:
        ValueError: a bound is too small or not a number.
        InvalidTagError: `log` is a log of the platform itself.
    """
    if log.startswith("$"):
        raise InvalidTagError(f"{log} is reserved for the platform, which needs all its records.")
    if age_s is not None and (
        type(age_s) not in {int, float} or not AGE_S_MIN <= age_s <= _AGE_S_MAX
    ):
        raise ValueError(
            f"age_s must be a number of seconds, {AGE_S_MIN:g} or more, not {age_s!r}."
        )
    if size_bytes is not None and (
        type(size_bytes) is not int or not 0 < size_bytes <= _SIZE_BYTES_MAX
    ):
        raise ValueError(
            f"size_bytes must be a number of bytes greater than 0, not {size_bytes!r}."
        )
    return Retention(None if age_s is None else float(age_s), size_bytes)
