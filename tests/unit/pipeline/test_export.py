"""Exports have each record once, whatever interrupts them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import indilog
from indilog.base.errors import ConfigError
from indilog.cli.commands import app
from indilog_pipeline import export as module
from indilog_pipeline.export import export
from indilog_pipeline.spark.tasks import GapError

CHUNK_BYTES = 1_000
KILLS = 3
CHUNKS = 4
"""Chunks, of 25, after which a program waits for its kill; it then has written one more."""


def write(directory: Path, records: int, floor: int = 0) -> list[indilog.Record]:
    """Append records to a log beside another one; return all from its floor on."""

    async def story() -> list[indilog.Record]:
        async with indilog.open(directory) as client:
            log = client.log("a")
            for number in range(0, records, 10):
                entries = []
                for n in range(number, number + 10):
                    tags: list[str | int] = [f"t{n % 5}", n + 1]
                    entries.append(indilog.Entry(b"%d" % n, tags[: n % 3]))
                await log.append_batch(entries)
                await client.log("b").append(b"%d of another log" % number)
            return await log.read_range(bound=floor, limit=10_000)

    return asyncio.run(story())


def exported(directory: Path) -> list[tuple[int, bytes, tuple[str, ...]]]:
    """Return what readers of the folders find, ascending."""
    rows = []
    for path in directory.glob("date=*/bucket=*/*.parquet"):
        table = pq.ParquetFile(path).read().to_pylist()
        assert {f"date={row['ordered_at']:%Y-%m-%d}" for row in table} == {path.parts[-3]}
        tags = [row["tags"][0] % 2**64 % 4 if row["tags"] else 0 for row in table]
        assert {f"bucket={bucket}" for bucket in tags} == {path.parts[-2]}
        rows += [(row["seqnum"], row["data"], tuple(row["tag_names"])) for row in table]
    return sorted(rows)


def wanted(records: list[indilog.Record]) -> list[tuple[int, bytes, tuple[str, ...]]]:
    return [(r.seqnum, r.data, tuple(map(str, r.tags))) for r in records]


def run(data: Path, directory: Path, *, skips_gaps: bool = False) -> module.Exported:
    return export(
        "a",
        directory,
        path=str(data),
        buckets=4,
        chunk_bytes=CHUNK_BYTES,
        skips_gaps=skips_gaps,
    )


def test_each_run_adds_what_was_appended_meanwhile(tmp_path: Path) -> None:
    data, directory = tmp_path / "data", tmp_path / "out"
    reported: list[tuple[int, int, int]] = []
    for count in (100, 50):
        records = write(data, count)
        done = export(
            "a", directory, path=str(data), buckets=4, chunk_bytes=CHUNK_BYTES,
            progress=lambda *at: reported.append(at),
        )  # fmt: skip
        assert exported(directory) == wanted(records)
        assert done.records == count
    assert run(data, directory).records == 0
    assert len(reported) > 4, "there were several chunks"
    assert all(start <= at <= end for start, at, end in reported)


class Killed(BaseException):
    """Ends an export at once, as a kill does."""


def test_an_export_may_end_before_any_sync_or_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    records = write(data, 40)
    kept_sync, kept_replace = module._sync, Path.replace
    left = 0

    def dying(call: Callable[..., object]) -> Callable[..., object]:
        def run_or_die(*arguments: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return call(*arguments)

        return run_or_die

    monkeypatch.setattr(module, "_sync", dying(kept_sync))
    monkeypatch.setattr(Path, "replace", dying(kept_replace))
    seen = set()
    for step in range(1, 200):
        directory, deaths = tmp_path / f"out{step}", 0
        while True:
            left = step if deaths == 0 else 10_000
            try:
                run(data, directory)
            except Killed:
                deaths += 1
                found = exported(directory)
                seen.add(len(found))
                assert found == sorted(set(found)), "no record is there twice"
                continue
            break
        assert exported(directory) == wanted(records)
        if not deaths:
            break
    assert step > 20, "many steps were interrupted"
    assert len(seen) > 3


PROGRAM = """
import sys
from pathlib import Path
from indilog_pipeline.export import export
def permitted(*_):
    sys.stdin.readline()
print("begun", flush=True)
export("a", Path(sys.argv[2]), path=sys.argv[1], buckets=4, chunk_bytes=1_000, progress=permitted)
"""
"""After each chunk it waits for a line, or the end of the lines."""


def test_a_killed_export_continues(tmp_path: Path) -> None:
    data, directory = tmp_path / "data", tmp_path / "out"
    records = write(data, 600)
    chance, ends = random.Random(1), list[int | None]()
    for attempt in range(KILLS + 1):
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(data), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with program:
            assert program.stdin is not None
            assert program.stdout is not None
            assert program.stdout.readline()
            if attempt < KILLS:
                program.stdin.write(b"\n" * CHUNKS)
                program.stdin.flush()
                time.sleep(chance.uniform(0.01, 0.12))
                os.kill(program.pid, signal.SIGKILL)
            program.stdin.close()
        ends.append(program.returncode)
        found = exported(directory)
        assert len(set(found)) == len(found)
        assert set(found) <= set(wanted(records))
    assert ends == [*[-signal.SIGKILL] * KILLS, 0]
    assert exported(directory) == wanted(records)


def test_the_command_says_what_it_exported_or_one_sentence(tmp_path: Path) -> None:
    records = write(tmp_path / "data", 10)
    data, directory = str(tmp_path / "data"), tmp_path / "out"
    done = CliRunner().invoke(app, ["export", data, "a", str(directory), "--buckets", "4"])
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"Exported 10 records of a with seqnums in [0, 11) to {directory}.\n"
    assert exported(directory) == wanted(records)
    refused = CliRunner().invoke(app, ["export", data, "b", str(directory), "--buckets", "4"])
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"{directory} has log 'a' in 4 buckets; ")
    assert refused.stderr.count("\n") == 1


def test_trimmed_records_are_missing_only_where_they_were_never_there(tmp_path: Path) -> None:
    async def trim(until: int) -> None:
        async with indilog.open(tmp_path / "data") as client:
            await client.log("a").trim(until)

    write(tmp_path / "data", 50)
    asyncio.run(trim(22))
    assert run(tmp_path / "data", tmp_path / "out").records == 30
    more = write(tmp_path / "data", 50, floor=22)
    asyncio.run(trim(66))
    with pytest.raises(GapError, match=r"\[55, 66\) are trimmed before they were exported"):
        run(tmp_path / "data", tmp_path / "out")
    assert run(tmp_path / "data", tmp_path / "out", skips_gaps=True).skipped == 11
    found = exported(tmp_path / "out")
    assert found[30:] == [row for row in wanted(more) if row[0] >= 66]


@pytest.mark.parametrize("source", ["none", "other", "http://127.0.0.1:1"])
def test_a_wrong_source_leaves_no_directory(tmp_path: Path, source: str) -> None:
    (tmp_path / "other").mkdir()
    place = source if source.startswith("http") else str(tmp_path / source)
    refused = CliRunner().invoke(app, ["export", place, "a", str(tmp_path / "out")])
    assert refused.exit_code in {1, 2}
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_export_of_something_else_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "data", 10)
    run(tmp_path / "data", tmp_path / "out")
    path = str(tmp_path / "data")
    with pytest.raises(ConfigError, match="has log 'a' in 4 buckets"):
        export("b", tmp_path / "out", path=path, buckets=4)
    with pytest.raises(ConfigError, match="has log 'a' in 4 buckets"):
        export("a", tmp_path / "out", path=path, buckets=5)
    with pytest.raises(ConfigError, match="1 to 1,024 buckets"):
        export("a", tmp_path / "out", path=path, buckets=0)
    with module._locked(tmp_path / "out"), pytest.raises(ConfigError, match="Another export"):
        run(tmp_path / "data", tmp_path / "out")
    (tmp_path / "out" / "_indilog_export.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged"):
        run(tmp_path / "data", tmp_path / "out")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("owned", "is of kind owned"), ("order-first", "was switched to another kind")],
)
def test_a_log_with_records_in_cells_is_refused(tmp_path: Path, kind: str, reason: str) -> None:
    data, directory = tmp_path / "data", tmp_path / "out"

    async def story() -> None:
        async with indilog.open(data) as client:
            if kind == "owned":
                await client.create_log("a", "owned")
            await client.log("a").append(b"x")
            await client.create_log("b", "shared")
            if kind == "order-first":
                await client.switch_log("a", "order-first")
            await client.log("a").append(b"y")
            await client.log("b").append(b"z")

    asyncio.run(story())
    with pytest.raises(ConfigError, match=f"Log a {reason}"):
        run(data, directory)
    assert exported(directory) == []
    assert export("b", tmp_path / "b", path=str(data)).records == 1
