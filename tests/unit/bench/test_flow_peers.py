"""The comparison of durable functions: pinned packages, counted answers, and messages."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import sys
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bench import flow_peers
from bench.sides.flow_install import MissingError, python_in
from bench.sides.flows import FlowSide, Served, post
from bench.support.harness import ROOT, Round, closed_loop

NPM = ROOT / "requirements" / "peers-npm"


def test_packages_are_pinned_by_hash_and_name_no_registry() -> None:
    lock = (ROOT / "requirements" / "peers.lock").read_text()
    pinned = re.findall(r"^([\w.-]+)(?:\[\w+\])?==\S+ \\\n    --hash=sha256:", lock, re.MULTILINE)
    assert {"dbos", "restate-sdk", "hypercorn", "psycopg"} <= set(pinned)
    assert len(pinned) == len(re.findall(r"^[\w.-]+(?:\[\w+\])?==", lock, re.MULTILINE))
    packages = json.loads((NPM / "package-lock.json").read_text())["packages"]
    assert all("integrity" in package for name, package in packages.items() if name)
    for text in (lock, (NPM / "package-lock.json").read_text()):
        assert "://" not in text
        assert "resolved" not in text


@pytest.mark.asyncio
async def test_an_answer_after_the_round_does_not_count() -> None:
    answered = 0

    async def one(caller: int) -> object:
        nonlocal answered
        if caller == 1:
            await asyncio.Event().wait()
        await asyncio.sleep(0.001)
        answered += 1
        return None

    found = await closed_loop(one, callers=2, seconds=0.1, patience_s=1.0)
    assert found.operations == answered > 0


def test_a_round_without_answers_has_no_latency() -> None:
    assert Round(0, 1.0, 0.0, array("d")).quantile(0.5) == float("inf")


def test_a_failed_installation_is_reported_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    with pytest.raises(MissingError, match="Python's venv did not finish"):
        python_in(tmp_path)
    assert not (tmp_path / "python" / "made-from").exists()


@pytest.mark.asyncio
async def test_a_missing_side_does_not_end_the_comparison_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @asynccontextmanager
    async def missing(_peers: Path) -> AsyncIterator[Served]:
        if asked.rounds:
            raise MissingError("npm failed: no network")
        yield Served(0, {}, "")

    @asynccontextmanager
    async def there(_peers: Path) -> AsyncIterator[Served]:
        closed: list[asyncio.Future[None]] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            closed.append(asyncio.get_running_loop().create_future())
            # A client that leaves before an answer resets its connection.
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while await reader.readuntil(b"\r\n\r\n1"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n1")
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            closed.pop().set_result(None)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            yield Served(port, {"no-op": post("/noop")}, "7")
            await asyncio.gather(*closed)

    @asynccontextmanager
    async def failing(_peers: Path) -> AsyncIterator[Served]:
        if asked.rounds:
            raise SystemExit("postgresql is missing")
        yield Served(0, {}, "")

    sides = {
        name: FlowSide("", how) for name, how in zip("abc", (missing, there, failing), strict=True)
    }
    monkeypatch.setattr(flow_peers, "SIDES", sides)
    asked = argparse.Namespace(
        sides=["a", "b", "c"], operations=["no-op", "counter"], callers=[1, 2], rounds=2,
        seconds=0.01, peers_dir=tmp_path,
    )  # fmt: skip
    found, reported = await flow_peers.compare(asked)
    assert reported == {
        "a": "not measured: npm failed: no network",
        "b": "7",
        "c": "not measured: postgresql is missing",
    }
    assert {
        cell: {side: len(r) for side, r in rounds.items()} for cell, rounds in found.items()
    } == {
        ("no-op", 1): {"b": 2},
        ("no-op", 2): {"b": 2},
    }
    assert flow_peers.row_of("a", "no-op", found, [1, 2]) == [""] * 4
    row = flow_peers.row_of("b", "no-op", found, [1, 2])
    assert [bool(cell) for cell in row] == [True, False, True, False], "no base, no ratios"
