"""The command `rebuild-index` on a directory that a platform left."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import indilog.client
from indilog.cli.commands import app
from indilog.config import ClusterConfig, Config, node_config
from indilog.kernel.index_snapshot import opened_snapshot, read_rows, snapshot_files
from indilog.kernel.tag_filter import TagFilterBuilder
from indilog.runtime.cluster.cluster_state import PLATFORM_KEY, layout_in
from indilog.runtime.metadata.embedded import EmbeddedMetadataStore
from indilog.runtime.snapshot_files import SnapshotFolder
from indilog_pipeline import session
from indilog_pipeline.rebuild.local import LocalEngine
from indilog_pipeline.rebuild.plan import Built, RebuildPlan
from indilog_pipeline.rebuild.run import rebuild_index

CONFIG = Config(
    cluster=ClusterConfig(durability="memory", index_shards=2),
    node=node_config(segment_bytes=8 << 20, index_snapshot_entries_min=16),
)
RECORDS = 60


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["rebuild-index", *map(str, arguments)])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    async def fill() -> None:
        async with indilog.client.open(tmp_path / "data", CONFIG) as client:
            log = client.log("orders")
            for number in range(RECORDS):
                await log.append(b"", tags=[f"t{number % 3}"])

    asyncio.run(fill())
    return tmp_path / "data"


async def found(data: Path, tag: str, index_shards: int = 2) -> list[int]:
    cluster = dataclasses.replace(CONFIG.cluster, index_shards=index_shards)
    async with indilog.client.open(data, dataclasses.replace(CONFIG, cluster=cluster)) as client:
        return [record.seqnum for record in await client.log("orders").read_range(tag, bound=0)]


def test_an_index_whose_snapshots_are_gone_is_rebuilt(data: Path) -> None:
    shutil.rmtree(data / "snapshots", ignore_errors=True)
    said = run(data)
    assert said.exit_code == 0, said.output
    engine, *index_shards = said.stdout.splitlines()
    assert engine.startswith(f"Engine local: {RECORDS} records take one process about 0 s")
    assert sum(int(line.split()[3]) for line in index_shards) == 3 * RECORDS
    assert "is the newest" in run(data).output
    assert run(data, "--verify").output.count("has the rows of the records") == 2
    assert asyncio.run(found(data, "t1")) == list(range(1, RECORDS, 3))


def test_the_first_row_that_differs_is_printed(data: Path) -> None:
    run(data)
    folder = data / "snapshots" / "index-0-0"
    parquet, snapshot = opened_snapshot(snapshot_files(folder)[0][1])
    rows = read_rows(parquet, 0)
    left = rows.chosen(np.arange(len(rows.tags)) != 40)
    SnapshotFolder(folder).put(snapshot.info, [left], TagFilterBuilder(99, bytes_max=1000))
    said = run(data, "--verify")
    assert said.exit_code == 1
    assert f"where the records give (tag {int(rows.tags[40]):#018x}, seqnum" in said.output
    assert run(data).exit_code == 0


def test_without_an_intact_snapshot_of_its_records_nothing_counts_as_verified(
    data: Path, tmp_path: Path
) -> None:
    run(data)
    folder = data / "snapshots" / "index-0-0"
    for _, file in snapshot_files(folder):
        file.write_bytes(file.read_bytes()[:-1])
    said = run(data, "--verify")
    assert (said.exit_code, said.stdout.count("has the rows of the records")) == (1, 1)
    assert said.stderr == f"No snapshot in {folder} is intact and of this log; rebuild the index.\n"
    shutil.rmtree(data / "snapshots")
    said = run(data, "--verify")
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr.startswith("Nothing was compared: there is no snapshot.")

    async def opened() -> None:
        async with indilog.client.open(tmp_path / "empty", CONFIG):
            pass

    asyncio.run(opened())
    said = run(tmp_path / "empty", "--verify")
    assert (said.exit_code, said.output) == (0, "There are no records, and no snapshots.\n")


def test_the_number_of_index_shards_changes_and_the_platform_starts_with_it(data: Path) -> None:
    view = layout_in(data).view
    for shards, anew, of_view in ((3, [], 3), (1, [], 3), (4, ["--anew"], 4)):
        said = run(data, "--index-shards", shards, *anew)
        assert said.exit_code == 0, said.output
        assert said.output.endswith(
            f"Start the platform with index_shards = {shards} from now on.\n"
        )
        view = layout_in(data).view
        assert (len(view.index_shards), len(view.eras[-1].shards)) == (of_view, shards)
        assert asyncio.run(found(data, "t1", shards)) == list(range(1, RECORDS, 3))
        assert layout_in(data)[0] == view
    assert len(view.eras) == 1
    assert run(data, "--anew").exit_code == 2
    assert run(data, "--verify", "--index-shards", 2).exit_code == 2


def test_an_engine_that_cannot_start_is_one_sentence(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(data / "snapshots", ignore_errors=True)
    monkeypatch.setattr(session, "why_not", lambda: session.NO_JAVA)
    said = run(data, "--engine", "spark")
    assert (said.exit_code, said.stderr) == (2, f"{session.NO_JAVA}\n")
    said = run(data, "--engine", "local", "--master", "local[2]")
    assert (said.exit_code, said.stderr.count("\n")) == (2, 1)


def test_a_directory_in_use_or_of_something_else_is_one_sentence(
    data: Path, tmp_path: Path
) -> None:
    async def beside() -> Result:
        async with indilog.client.open(data, CONFIG):
            return run(data)

    said = asyncio.run(beside())
    assert (said.exit_code, "is in use by another process" in said.output) == (2, True)
    said = run(tmp_path)
    assert (said.exit_code, said.output.count("\n")) == (2, 1)
    assert "is not the data directory" in said.output


def test_a_layout_that_zookeeper_has_is_read_from_its_copy_and_not_changed(data: Path) -> None:
    with EmbeddedMetadataStore(data / "metadata", CONFIG.node) as metadata:
        metadata.replace(PLATFORM_KEY, b"0123456789abcdef")  # as a start with ZooKeeper does
    shutil.rmtree(data / "snapshots", ignore_errors=True)
    assert run(data).exit_code == 0
    assert run(data, "--verify").exit_code == 0
    before = layout_in(data)
    for options in ((), ("--anew",)):
        said = run(data, "--index-shards", 3, *options)
        assert said.exit_code == 2
        assert "ZooKeeper has the layout of" in said.output
    assert layout_in(data) == before


def test_a_full_disk_is_one_sentence_and_loses_nothing(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(data / "snapshots", ignore_errors=True)
    before = {path: path.read_bytes() for path in data.rglob("*.log")}

    def no_room(self: SnapshotFolder, file: Path, position: int) -> None:
        raise OSError(errno.ENOSPC, f"Error writing {file} of {position} to {self}")

    with monkeypatch.context() as patched:
        patched.setattr(SnapshotFolder, "put_copy", no_room)
        result = run(data)
    assert result.exit_code == 2
    assert "No space left on device. Nothing is lost: make room there" in result.stderr
    assert not [*data.glob("rebuild-*")]
    assert {path: path.read_bytes() for path in data.rglob("*.log")} == before
    assert run(data).exit_code == 0
    assert run(data, "--verify").exit_code == 0


def test_an_engine_gets_absolute_places(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors of a cluster work in directories of their own."""
    shutil.rmtree(data / "snapshots", ignore_errors=True)
    monkeypatch.chdir(data.parent)
    plans: list[RebuildPlan] = []

    def engine(plan: RebuildPlan) -> Mapping[int, Built]:
        plans.append(plan)
        return LocalEngine()(plan)

    rebuild_index(Path(data.name), engine)
    assert plans[0].workspace.is_absolute()
    assert plans[0].image.directory.is_absolute()
