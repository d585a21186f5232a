"""Injects the planned faults while time is left, and never more than the platform promises."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import NamedTuple

from tests.nemesis.faults import RECOVERY_S_MAX, Faults
from tests.nemesis.plan import kinds_of, planned
from tests.nemesis.promise import EVERYTHING, Fault, Promise, Topology


class Injected(NamedTuple):
    """A fault that was injected; seconds since the beginning of the run."""

    fault: Fault
    began_s: float
    undone_s: float
    recovered_s: float
    what: str

    def __str__(self) -> str:
        times = f"{self.began_s:.1f} s, undone {self.undone_s:.1f}, over {self.recovered_s:.1f}"
        return f"{times}: {self.fault}: {self.what}"


class Injector:
    """Injects faults into all groups at the same time, one after the other in each.

    Attributes:
        injected: the faults that are over.
        failures: faults from which the cluster did not recover, and errors of the nemesis itself.
    """

    def __init__(
        self, topology: Topology, faults: Faults, seed: int, kinds: Collection[str]
    ) -> None:
        self.injected: list[Injected] = []
        self.failures: list[str] = []
        self.began = time.monotonic()
        self._topology = topology
        self._faults = faults
        self._seed = seed
        self._kinds = kinds
        self._promise = Promise(topology)
        self._over = asyncio.Condition()
        self._first: Fault | None = None
        """A fault that needs an unimpaired cluster; no other one begins before it."""

    def now(self) -> float:
        """Return the seconds since the beginning."""
        return time.monotonic() - self.began

    async def run(self, seconds: float) -> None:
        """Inject faults for so long, or until the cluster does not recover from one; then wait
        until the cluster has recovered from all.
        """
        topology = self._topology
        groups = {group: kinds_of(topology, group, self._kinds) for group in topology.groups}
        lives = [self._live(group, kinds, seconds) for group, kinds in groups.items() if kinds]
        await asyncio.gather(*lives)

    async def _live(self, group: str, kinds: Collection[str], seconds: float) -> None:
        for drawn in planned(self._topology, self._seed, group, kinds):
            await asyncio.sleep(max(0.0, min(drawn.pause_s, seconds - self.now())))
            fault = self._promise.target_of(drawn)
            if self.now() >= seconds or not await self._begun(fault, seconds):
                return
            await self._one(fault)

    async def _begun(self, fault: Fault, seconds: float) -> bool:
        """Wait until a fault may begin; return False if the run is over."""
        async with self._over:
            if fault.target == EVERYTHING:
                self._first = fault
            while not (self._promise.allows(fault) and self._first in (None, fault)):
                await self._over.wait()
            self._first = None if self._first == fault else self._first
            if is_over := self.now() >= seconds or bool(self.failures):
                self._over.notify_all()
            else:
                self._promise.begin(fault)
            return not is_over

    async def _one(self, fault: Fault) -> None:
        began_s, what, undone_s = self.now(), "", 0.0
        try:
            what = await self._faults.inject(fault)
            undone_s = self.now()
            if wrong := await self._faults.recovered(fault):
                what += f"; last wrong: {wrong}"
        except TimeoutError as error:
            self.failures.append(f"liveness: {RECOVERY_S_MAX:g} s after {fault} ({what}): {error}")
        except (AssertionError, OSError) as error:
            self.failures.append(f"nemesis: {fault} at {began_s:.1f} s: {error!r}")
        self.injected.append(Injected(fault, began_s, undone_s, self.now(), what))
        async with self._over:
            self._promise.end(fault)
            self._over.notify_all()
