"""The ports of servers of tests and benchmarks (`bench.support.servers`)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.support import servers
from tests.cluster.platform_process import ROOT

FEW, TAKEN = (30_000, 30_200), 60
OTHER = f"""
from bench.support import servers
servers._PORTS = {FEW}
print(*(servers.free_port() for _ in range({TAKEN})))
"""


def test_no_port_is_given_twice_in_this_process_or_to_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "_PORTS", FEW)
    ours = [servers.free_port() for _ in range(TAKEN)]
    first = servers.free_ports(2)
    done = subprocess.run(
        [sys.executable, "-c", OTHER], cwd=ROOT, capture_output=True, text=True, check=True
    )
    all_ = [*ours, first, first + 1, *map(int, done.stdout.split())]
    assert len(set(all_)) == len(all_) == 2 * TAKEN + 2
