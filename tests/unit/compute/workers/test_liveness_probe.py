"""`LivenessProbe`: when a worker counts as blocked, and when it answers again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from indilog.base.errors import OverloadedError
from indilog.link.link_messages import Answer
from indilog_compute.workers.liveness_probe import LivenessProbe
from indilog_compute.workers.process import Worker

pytestmark = [pytest.mark.asyncio, pytest.mark.leaping]


class PingedLink:
    """The link of a worker with one open call."""

    def __init__(self) -> None:
        self.is_lost = False
        self.calls_open = 1
        self.is_full = False
        self.answers: list[Callable[[Answer], None]] = []

    def post(self, _: object, on_answer: Callable[[Answer], None]) -> None:
        if self.is_full:
            raise OverloadedError("the worker does not read")
        self.answers.append(on_answer)


class PingedWorker:
    """A worker, as far as a probe knows it."""

    def __init__(self) -> None:
        self.link = PingedLink()


class Probed:
    """A probe, and what it reported."""

    def __init__(self, *, stop_when_silent: bool = False) -> None:
        self.worker = PingedWorker()
        self.reports: list[str] = []
        self.silent = asyncio.Event()
        self._stop_when_silent = stop_when_silent
        self.probe = LivenessProbe(
            cast("Worker", self.worker),
            silent_s=0.02,
            on_silent=self._on_silent,
            on_recovered=lambda _: self.reports.append("heard"),
        )

    def _on_silent(self, _: Worker) -> None:
        self.reports.append("silent")
        self.silent.set()
        if self._stop_when_silent:
            self.probe.stop()

    def answer(self) -> None:
        """Let the worker answer the first open ping."""
        self.worker.link.answers.pop(0)(cast("Any", object()))


async def test_a_worker_that_misses_pings_is_reported_silent_once_and_then_responsive() -> None:
    probed = Probed()
    probed.probe.watch()
    await asyncio.wait_for(probed.silent.wait(), 60)
    probed.answer()
    assert probed.reports == ["silent", "heard"]
    probed.probe.stop()


async def test_a_worker_whose_send_buffer_stays_full_is_silent_too() -> None:
    probed = Probed()
    probed.worker.link.is_full = True
    probed.probe.watch()
    await asyncio.wait_for(probed.silent.wait(), 60)
    assert probed.reports == ["silent"]
    probed.probe.stop()


async def test_the_report_of_a_silent_worker_may_end_the_probing() -> None:
    probed = Probed(stop_when_silent=True)
    probed.probe.watch()
    await asyncio.wait_for(probed.silent.wait(), 60)
    assert probed.probe._timer is not None
    assert probed.probe._timer.cancelled()
