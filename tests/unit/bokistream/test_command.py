"""`python -m bokistream` on a platform in memory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from typer.testing import CliRunner, Result

import indilog
from bokistream import Catalog, Streams
from bokistream.__main__ import commands
from bokistream.catalog import catalog_replica
from indilog.base.errors import NotReadyError
from indilog.testing import MemoryLogs


class Platform:
    """Two platforms; the first one has a stream `orders` in the log `work`: four records.

    Their time stands still.
    """

    def __init__(self) -> None:
        self.logs = {at: MemoryLogs(clock=lambda: 1.7e9) for at in ("here", "there")}

    def streams(self, at: str = "here") -> Streams:
        log = self.logs[at].log("work")
        return Streams(log, catalog=Catalog(log, catalog_replica()))

    async def fill(self) -> None:
        streams = self.streams()
        await streams.create("orders", age_s=60, size_bytes=1_000, grace_s=30)
        async with streams.writer("orders") as writer:
            for number in range(3):
                await writer.append(b"order %d" % number, txid=10 * number)
            last = await writer.append(b"\xff", txid=20)
        await (await streams.reader("orders", "billing")).commit(last - 1)

    def run(self, *words: str, url: str = "here") -> Result:
        where = [] if words[0] == "mirror" else ["--url", url]
        return CliRunner().invoke(commands, [*words, *where])


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Platform:
    made = Platform()

    @asynccontextmanager
    async def connect(url: str = "here", *, token: str | None = None) -> AsyncIterator[MemoryLogs]:
        if url not in made.logs:
            raise NotReadyError(f"No platform answers at {url}.")
        yield made.logs[url]

    monkeypatch.setattr(indilog, "connect", connect)
    asyncio.run(made.fill())
    return made


def test_list_and_show_print_streams_writers_and_readers(platform: Platform) -> None:
    (line,) = platform.run("list", "work").output.splitlines()
    assert line.startswith("orders  open, 4 records, 22 bytes, last txid 20, readable from")
    shown = platform.run("show", "work", "orders").output.splitlines()
    assert shown[0] == line
    token = asyncio.run(platform.streams().last("orders")).token
    assert shown[1:] == [
        "records are kept for 60 s, the newest 1,000 bytes; truncated ones for 30 s",
        f"fencing token {token}, last heartbeat 0 s ago",
        "reader billing: 1 records behind",
        f"writer {token}: offsets 0 to 4",
    ]
    found = json.loads(platform.run("show", "work", "orders", "--json").output)
    assert (found["next_offset"], found["is_sealed"]) == (4, False)
    assert found["readers"][0]["behind"] == 1


def test_read_prints_records_and_truncated_ones_on_request(platform: Platform) -> None:
    first = platform.run("read", "work", "orders", "--limit", "1").output.split()
    assert (first[0], first[2:]) == ("0", ["txid", "0", "order", "0"])
    truncated = platform.run("truncate", "work", "orders", "--before-txid", "20")
    assert truncated.output.startswith("The stream is truncated below seqnum")
    kept = platform.run("read", "work", "orders", "--json").output.splitlines()
    assert [json.loads(line).get("data", "bytes") for line in kept] == ["order 2", "bytes"]
    assert len(platform.run("read", "work", "orders", "--truncated").output.splitlines()) == 4
    assert (
        len(platform.run("read", "work", "orders", "--from-offset", "3").output.splitlines()) == 1
    )


def test_seal_and_delete_want_a_confirmation(platform: Platform) -> None:
    for command in ("seal", "delete"):
        refused = platform.run(command, "work", "orders")
        assert refused.exit_code == 2
        assert "repeat it with --yes" in refused.stderr
    assert platform.run("seal", "work", "orders", "--yes").output == "The stream is sealed.\n"
    assert platform.run("list", "work").output.startswith("orders  sealed")
    assert platform.run("delete", "work", "orders", "--yes").output == "The stream is deleted.\n"
    assert platform.run("list", "work").output == ""


def test_mirror_copies_a_stream_and_says_how_far_it_is(platform: Platform) -> None:
    for _ in range(2):
        done = platform.run("mirror", "here", "there", "work", "orders", "--once")
        assert done.exit_code == 0, done.output
        assert done.output.endswith("The copy has all records of the stream.\n")
    assert asyncio.run(platform.streams("there").last("orders")).offset == 4
    here, there = (platform.run("read", "work", "orders", url=at).output for at in platform.logs)
    for text in (here, there):
        lines = [line.split() for line in text.splitlines()]
        assert [(line[0], line[3]) for line in lines] == [
            ("0", "0"), ("1", "10"), ("2", "20"), ("3", "20"),
        ]  # fmt: skip


def test_a_mistake_gets_one_sentence(platform: Platform) -> None:
    missing = platform.run("show", "work", "invoices")
    assert (missing.exit_code, missing.stderr) == (
        2, "Log 'work' has no stream 'invoices'; create it first.\n",
    )  # fmt: skip
    assert platform.run("truncate", "work", "orders").exit_code == 2
    away = platform.run("list", "work", url="away")
    assert (away.exit_code, away.stderr) == (1, "No platform answers at away.\n")


@pytest.mark.parametrize(
    ("source", "stream", "ended"),
    [
        ("away", "orders", (1, "No platform answers at away.\n")),
        ("here", "missing", (2, "Log 'work' has no stream 'missing'; create it first.\n")),
    ],
)
def test_mirror_ends_with_1_if_the_same_command_may_succeed_later_else_with_2(
    platform: Platform,
    source: str,
    stream: str,
    ended: tuple[int, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bokistream.__main__._AWAY_S_MAX", 0)
    result = platform.run("mirror", source, "there", "work", stream, "--once")
    assert (result.exit_code, result.stderr) == ended
