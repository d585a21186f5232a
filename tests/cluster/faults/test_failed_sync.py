"""A failed sync ends the process, once, and the next one recovers from disk (PITFALLS 16).

The system itself fails the call: strace injects `EIO` into the process that runs.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import indilog
from indilog.base.errors import IndilogError
from tests.cluster.faults.test_wiped_replica import process_of
from tests.cluster.platform_process import platform

pytestmark = pytest.mark.cluster
DEADLINE_S = 200.0


@contextmanager
def syncs_failing(pid: int) -> Iterator[None]:
    """Let the process's syncs fail while the block runs."""
    if shutil.which("strace") is None:
        pytest.skip("there is no strace to let a sync fail")
    failing = "inject=fdatasync:error=EIO"
    command = ["strace", "-f", "-p", str(pid), "-e", failing, "-o", "/dev/null"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        line = tracer.stderr.readline()
        if "attached" not in line:
            tracer.kill()
            pytest.skip(f"a process cannot be traced here: {line.strip()}")
        try:
            yield
        finally:
            # Not SIGTERM: strace then waits for the process to stop, also while it ends, and hangs.
            tracer.kill()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.asyncio
async def test_a_failed_sync_ends_the_process_and_nothing_acknowledged_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INDILOG_CLUSTER_SEQUENCERS", "1")
    monkeypatch.setenv("INDILOG_NODE_RECORD_CACHE_BYTES_MAX", "0")
    data = tmp_path / "data"
    with platform(data, "--processes") as running:
        async with indilog.connect(running.url) as client:
            log = client.log("kept")
            acknowledged = {await log.append(b"%d" % n): b"%d" % n for n in range(10)}
            pid = process_of("storage-0", data)
            with syncs_failing(pid):
                append = asyncio.create_task(log.append(b"10"))
                deadline = time.monotonic() + DEADLINE_S
                while not is_gone(pid):
                    assert time.monotonic() < deadline, (
                        "the process does not end after a failed sync"
                    )
                    await asyncio.sleep(0.02)
            with suppress(IndilogError):  # the record of the failed append may or may not exist
                acknowledged[await append] = b"10"
            acknowledged[await log.append(b"11")] = b"11"
            assert process_of("storage-0", data) != pid
            for seqnum, expected in acknowledged.items():
                record = await log.read(seqnum)
                assert record is not None
                assert record.data == expected
