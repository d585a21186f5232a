"""A group of settings, and the checks that a group declares.

`ClusterConfig` and all groups of `NodeConfig` are subclasses of `SettingsGroup`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Final

from indilog.base.errors import ConfigError

KIB: Final = 1024
MIB: Final = 1024 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingsGroup:
    """Settings that belong together. The settings are checked when an instance is created.

    Every number must be greater than 0, except those in `may_be_zero`.

    Attributes:
        may_be_zero: settings for which 0 is allowed.
        ordered: pairs of settings; the first must not exceed the second, unless the second is 0.
        shares: settings that are at most 1.

    Raises:
        ConfigError: a setting is out of its range; the message names it.
    """

    may_be_zero: ClassVar[frozenset[str]] = frozenset()
    ordered: ClassVar[tuple[tuple[str, str], ...]] = ()
    shares: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        """Check each setting, then the settings against each other."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if field.name in self.may_be_zero:
                if value < 0:
                    raise ConfigError(f"{field.name} must be at least 0, not {value}.")
            elif value < 1e-9:
                raise ConfigError(f"{field.name} must be greater than 0, not {value}.")
        for lower, upper in self.ordered:
            check_order(lower, getattr(self, lower), upper, getattr(self, upper))
        for share in self.shares:
            if getattr(self, share) > 1:
                raise ConfigError(f"{share} is a share, so it must be at most 1.")


def check_order(lower: str, low: float, upper: str, high: float) -> None:
    """Raise if the setting `lower` exceeds the setting `upper`, unless `high` is 0.

    Raises:
        ConfigError: `low` is greater than `high`.
    """
    if low > high > 0:
        raise ConfigError(f"{lower} ({low:,}) must not exceed {upper} ({high:,}).")


def names_listed(text: str) -> tuple[str, ...]:
    """Return the names in a setting that lists them, separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
