"""How benchmarks get a log: embedded in this process, or over the tiers as separate processes."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

from indilog.config import Config, config_from
from indilog.log import Log, Session
from indilog.runtime.assembly import embedded

Status: TypeAlias = dict[str, dict[str, int]]
"""Entries, bytes, hits and misses of each part of the local index, and of the record cache."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """A platform under test, seen from its compute node."""

    log: Log
    config: Config
    status: Callable[[], Status]

    def hit_ratio(self, before: Status, part: str) -> float | None:
        """Return which share of the lookups since `before` a part answered; None: it had none."""
        now = self.status()
        hits = now[part]["hits"] - before[part]["hits"]
        asked = hits + now[part]["misses"] - before[part]["misses"]
        return hits / asked if asked else None


def configured(path: str | Path, **settings: dict[str, Any]) -> Config:
    """Return the defaults with some settings changed (`node={...}`, `cluster={...}`), in `path`."""
    node = {**settings.pop("node", {}), "data_dir": Path(path)}
    return config_from(overrides={**settings, "node": node})


@asynccontextmanager
async def running(config: Config) -> AsyncIterator[Bench]:
    """Run a platform embedded in this process; give one log of it."""
    async with embedded(config) as platform:
        logs = platform.logs
        yield Bench(logs.log("bench", Session()), config, logs.engine.status)
