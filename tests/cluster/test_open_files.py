"""Connections do not use up the file descriptors that the journal needs."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.cluster.platform_process import platform
from tests.support.clients import token_headers

pytestmark = pytest.mark.cluster

_OPEN_FILES_MAX = 256
_RECORD = b"x" * 500_000


def test_half_requests_take_no_descriptor_that_a_segment_roll_needs(tmp_path: Path) -> None:
    """Six times as many connections as the process may have descriptors; 30 MB are four
    segments.
    """
    with (
        platform(tmp_path / "data", open_files_max=_OPEN_FILES_MAX) as up,
        httpx.Client(
            base_url=up.url, timeout=120, trust_env=False, headers=token_headers(up.url)
        ) as http,
        ExitStack() as connections,
    ):

        def append() -> None:
            answer = http.post(
                "/logs/orders/records",
                content=_RECORD,
                headers={"content-type": "application/octet-stream"},
            )
            assert answer.status_code == 201, answer.text

        append()
        at = urlsplit(up.url)
        for _ in range(6 * _OPEN_FILES_MAX):
            half = connections.enter_context(socket.create_connection((at.hostname, at.port), 120))
            half.setblocking(False)
            try:
                half.send(b"POST /logs/orders/records HTTP/1.1\r\nHost: lo")
            except OSError:  # the platform has closed it
                continue
        for _ in range(60):
            append()
        status = http.get("/status").json()
        assert status["gateway"]["connections_max"] < _OPEN_FILES_MAX / 2
        assert http.get("/logs/orders/tail").json()["tail"] >= 61
        connections.close()
        again = httpx.get(f"{up.url}/readyz", trust_env=False, timeout=120)
        assert again.status_code == 200
