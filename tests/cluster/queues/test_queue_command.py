"""`python -m bokiqueue` asks a running platform."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import indilog
from bokiqueue import Queue
from tests.cluster.platform_process import ROOT, platform

pytestmark = pytest.mark.cluster


async def push(url: str) -> None:
    async with indilog.connect(url) as client:
        await Queue(client.log("work"), "mail", shards=3).push(b"hello", delay=3600)


def test_the_command_shows_and_purges_a_queue(tmp_path: Path) -> None:
    def run(*words: str) -> str:
        command = [sys.executable, "-m", "bokiqueue", *words, "work", "mail", "--url", running.url]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with platform(tmp_path) as running:
        asyncio.run(push(running.url))
        assert len(run("show").splitlines()) == 5
        assert run("peek").split()[1:] == ["delayed", "0", "tries", "hello"]
        assert run("purge", "--yes") == "1 messages were removed.\n"
        assert run("peek") == ""
