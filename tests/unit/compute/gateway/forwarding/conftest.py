"""Time limits of offers that a busy machine keeps."""

from __future__ import annotations

import pytest

from indilog_compute.gateway.forwarding import forwarder


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give nodes time to take or refuse a call; a test of a silent one shortens it."""
    monkeypatch.setattr(forwarder, "OFFER_S", 60.0)
