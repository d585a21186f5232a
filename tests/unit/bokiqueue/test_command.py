"""`python -m bokiqueue` on a platform in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from typer.testing import CliRunner, Result

import indilog
from bokiqueue import Queue, QueueReplica
from bokiqueue.__main__ import commands
from indilog.base.errors import NotReadyError
from indilog.testing import MemoryLogs


class Platform:
    """A platform with a queue `mail` in the log `work`: two messages and a dead letter."""

    def __init__(self) -> None:
        self.logs = MemoryLogs()
        self.urls: list[object] = []

    def queue(self) -> Queue:
        replica = QueueReplica("mail", 2)
        return Queue(self.logs.log("work"), "mail", shards=2, tries=1, replica=replica)

    async def fill(self) -> None:
        queue = self.queue()
        await queue.push(b"bad \xff")
        held = await queue.take()
        assert held is not None
        await held.requeue()
        for data in (b"one", b"two"):
            await queue.push(data, shard_key="a")

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(commands, [*words])


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Platform:
    made = Platform()

    @asynccontextmanager
    async def connect(*url: str) -> AsyncIterator[MemoryLogs]:
        made.urls += url
        if "away" in url:
            raise NotReadyError("No platform answers at away.")
        yield made.logs

    monkeypatch.setattr(indilog, "connect", connect)
    asyncio.run(made.fill())
    return made


def test_show_prints_the_sums_and_each_shard(platform: Platform) -> None:
    lines = platform.run("show", "work", "mail", "--url", "http://there").output.splitlines()
    assert platform.urls == ["http://there"]
    assert lines[0].split() == ["shard", "depth", "leased", "dead", "oldest"]
    assert lines[1].split()[:4] == ["all", "2", "0", "1"]
    assert len(lines) == 4
    stats = json.loads(platform.run("show", "work", "mail", "--json").output)
    assert (stats["depth"], stats["dead"], len(stats["shards"])) == (2, 1, 2)


def test_peek_prints_messages_and_takes_none(platform: Platform) -> None:
    for _ in range(2):
        lines = platform.run("peek", "work", "mail").output.splitlines()
        assert [line.split()[1:] for line in lines] == [
            ["ready", "0", "tries", "one"], ["ready", "0", "tries", "two"],
        ]  # fmt: skip
    assert "dead" in platform.run("peek", "work", "mail", "--dead").output
    assert len(platform.run("peek", "work", "mail", "--limit", "1").output.splitlines()) == 1
    said = json.loads(platform.run("peek", "work", "mail", "--dead", "--json").output)
    assert (said["state"], said["data_hex"]) == ("dead", b"bad \xff".hex())
    ready = platform.run("peek", "work", "mail", "--json").output.splitlines()
    assert [json.loads(line)["data"] for line in ready] == ["one", "two"]


def test_redrive_makes_dead_letters_ready(platform: Platform) -> None:
    assert platform.run("redrive", "work", "mail").output == "1 dead letters are ready again.\n"
    assert len(platform.run("peek", "work", "mail").output.splitlines()) == 3


def test_purge_asks_to_be_repeated_and_then_removes(platform: Platform) -> None:
    refused = platform.run("purge", "work", "mail")
    assert refused.exit_code == 2
    assert "permanently; repeat it with --yes." in refused.output
    assert len(platform.run("peek", "work", "mail").output.splitlines()) == 2
    assert platform.run("purge", "work", "mail", "--yes").output == "2 messages were removed.\n"
    removed = platform.run("purge", "work", "mail", "--dead", "--yes")
    assert removed.output == "1 dead letters were removed.\n"
    assert platform.run("peek", "work", "mail").output == ""


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("show", "work", "male"), 2, "Log 'work' has no queue 'male'."),
        (("peek", "other", "mail"), 2, "Log 'other' has no queue 'mail'."),
        (("redrive", "work", "mail", "--url", "away"), 1, "No platform answers at away."),
    ],
)
def test_a_mistake_is_one_sentence_and_creates_no_queue(
    platform: Platform, words: tuple[str, ...], code: int, sentence: str
) -> None:
    before = platform.logs.position
    done = platform.run(*words)
    assert (done.exit_code, done.output.strip()) == (code, sentence)
    assert platform.logs.position == before
