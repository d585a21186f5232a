"""Nodes do not look through their long-lived objects repeatedly, and still free cycles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CYCLES = """
import gc, weakref
from indilog.runtime.garbage import collect_rarely

class Node: pass

collect_rarely()
seen = []
for _ in range(30_000):
    node = Node()
    node.itself = node
    seen.append(weakref.ref(node))
print(sum(one() is not None for one in seen))
"""
PLATFORM = """
import gc, os, signal, sys
from pathlib import Path
from indilog.config import Config, node_config
from indilog.runtime.cluster.assembly import run_embedded

def ready(url):
    print(gc.get_threshold()[0], gc.get_freeze_count())
    os.kill(os.getpid(), signal.SIGTERM)

node = node_config(data_dir=Path(sys.argv[1]), workers=0, port=0)
run_embedded(Config(node=node), ready)
"""


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip().splitlines()[-1]


def test_garbage_in_cycles_is_freed() -> None:
    assert int(run(CYCLES)) <= 15_000


def test_a_platform_keeps_what_it_has_imported_out_of_collections(tmp_path: Path) -> None:
    young, kept = run(PLATFORM, str(tmp_path)).split()
    assert int(young) > 700
    assert int(kept) > 30_000
