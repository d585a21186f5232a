"""Fixture: the time that a busy machine takes for a connection."""

from __future__ import annotations

import pytest

from indilog.runtime.transport import stream_server, stream_transport


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_server, "HANDSHAKE_S_MAX", 20.0)
    monkeypatch.setattr(stream_transport, "CONNECT_S_MAX", 20.0)
