"""The file of write-once cells of a storage node."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from indilog.base.ids import NodeId
from indilog.config import KIB, MIB, Config, node_config
from indilog.runtime import cell_store
from indilog.runtime.cell_store import CellReader, CellStore, CellStores
from indilog.wire.cell_messages import (
    CELLS_LISTED_MAX,
    CellAnswer,
    CellKey,
    CellKeysWanted,
    CellOutcome,
    CellQuestion,
    CellsDrop,
    CellSection,
    CellsSeal,
    CellsTrim,
    CellWanted,
    CellWrite,
)
from tests.cluster.faults.small_disk import small_disk

DONE, TAKEN, UNWRITTEN = CellOutcome.DONE, CellOutcome.TAKEN, CellOutcome.UNWRITTEN
TRIMMED, SEALED, ABSENT = CellOutcome.TRIMMED, CellOutcome.SEALED, CellOutcome.ABSENT
RECORDS, GENERATION = CellSection.RECORDS, CellSection.GENERATION


def key(position: int, part: int = 0, section: CellSection = RECORDS) -> CellKey:
    return CellKey(section, position, part)


def write(position: int, content: bytes, epoch: int = 1) -> CellWrite:
    return CellWrite(0, "s", epoch, key(position), content)


def read(position: int, epoch: int = 1) -> CellWanted:
    return CellWanted(0, "s", epoch, key(position))


def trim(until: int, section: CellSection = RECORDS) -> CellsTrim:
    return CellsTrim(0, "s", 1, section, until)


def outcomes(store: CellStore, *questions: CellQuestion) -> list[CellOutcome]:
    return [answer.outcome for answer in store.serve(questions)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CellStore]:
    opened = CellStore(tmp_path / "cells")
    opened.serve([CellsSeal(0, "s", 1, opens=True)])
    yield opened
    opened.close()


def test_a_reader_of_the_file_is_answered_whatever_its_epoch_is(
    store: CellStore, tmp_path: Path
) -> None:
    reader = CellReader(tmp_path / "cells")
    for epoch in (1, 5):
        store.serve([CellsSeal(0, "s", epoch), write(epoch, b"x", epoch)])
        answer = reader.answer(read(epoch, epoch=3))
        assert (answer.outcome, answer.content, answer.epoch) == (DONE, b"x", epoch)
    assert reader.answer(read(2)).outcome is UNWRITTEN
    listed = reader.answer(CellKeysWanted(0, "s", 1, RECORDS)).listed
    assert listed == (key(1), key(5))
    assert reader.answer(CellWanted(0, "other", 1, key(1))).outcome is ABSENT
    reader.close()


def test_a_cell_takes_the_first_content(store: CellStore) -> None:
    assert outcomes(store, read(3), write(3, b"a"), write(3, b"b")) == [UNWRITTEN, DONE, TAKEN]
    assert outcomes(store, write(3, b"a")) == [DONE], "the same content again is harmless"
    (answer,) = store.serve([read(3)])
    assert (answer.outcome, answer.content) == (DONE, b"a")


def test_a_sealed_space_refuses_earlier_epochs_and_says_where_it_ends(store: CellStore) -> None:
    store.serve([write(7, b"x")])
    (sealed,) = store.serve([CellsSeal(0, "s", 2)])
    assert (sealed.outcome, sealed.end) == (DONE, 8)
    refused = store.serve([write(8, b"y"), read(7), CellsSeal(0, "s", 1), trim(8)])
    assert {answer.outcome for answer in refused} == {SEALED}
    assert {answer.epoch for answer in refused} == {2}
    assert outcomes(store, read(8, 2), write(8, b"y", 3), read(8, 2)) == [UNWRITTEN, DONE, SEALED]


def test_an_applied_cell_is_read_in_any_epoch(store: CellStore) -> None:
    store.serve([write(7, b"x"), CellsSeal(0, "s", 3)])
    applied = [CellWanted(0, "s", epoch, key(7), is_applied=True) for epoch in (1, 3)]
    for answer in (*store.serve(applied), *map(store.look_up, applied)):
        assert answer is not None
        assert (answer.outcome, answer.content, answer.epoch) == (DONE, b"x", 3)
    assert outcomes(store, CellWanted(0, "s", 1, key(8), is_applied=True)) == [UNWRITTEN]
    assert outcomes(store, write(8, b"y", 1), read(7, 1)) == [SEALED, SEALED]


def test_trimmed_cells_have_no_content_and_take_none(store: CellStore) -> None:
    store.serve([write(n, b"x" * 100) for n in range(6)])
    assert outcomes(store, trim(4), trim(2), read(3), read(4)) == [DONE, DONE, TRIMMED, DONE]
    assert outcomes(store, write(3, b"y"), write(9, b"z")) == [TAKEN, DONE]
    (listed,) = store.serve([CellKeysWanted(0, "s", 1, RECORDS)])
    assert ([k.position for k in listed.listed], listed.floor) == ([4, 5, 9], 4)
    assert store.serve([CellKeysWanted(0, "s", 1, GENERATION)])[0].floor == 0


def test_trims_free_space_on_the_disk(store: CellStore, tmp_path: Path) -> None:
    store.serve([write(n, bytes(4_000)) for n in range(1_000)])
    store.close()
    before = (tmp_path / "cells").stat().st_size
    assert before > 4_000_000
    again = CellStore(tmp_path / "cells")
    for until in range(100, 1_001, 100):
        again.serve([trim(until)])
    again.close()
    assert (tmp_path / "cells").stat().st_size < before / 2


def test_no_trace_stays_of_the_spaces_of_a_folder(store: CellStore, tmp_path: Path) -> None:
    """A later question about them is not answered as if the cells were unwritten."""
    spaces = ["log@1", "log@12", "log", "logs@1", "other-log@1"]
    store.serve([CellsSeal(0, space, 1, opens=True) for space in spaces])
    store.serve([CellWrite(0, space, 1, key(7), b"x") for space in spaces])
    store.serve([CellsTrim(0, space, 1, RECORDS, 3) for space in spaces])
    for _ in range(2):
        assert outcomes(store, CellsDrop(0, "log")) == [DONE]
        found = outcomes(store, *(CellWanted(0, space, 1, key(7)) for space in spaces))
        assert found == [ABSENT, ABSENT, DONE, DONE, DONE]
    assert outcomes(store, CellWrite(0, "log@1", 1, key(9), b"y")) == [ABSENT]
    assert outcomes(store, CellsSeal(0, "log@12", 5)) == [ABSENT]
    assert store.look_up(CellWanted(0, "log@1", 1, key(7))) is None
    with sqlite3.connect(tmp_path / "cells") as file:
        for table, left in (("cells", 3), ("floors", 3), ("spaces", 4)):
            assert file.execute(f"SELECT count(*) FROM {table}").fetchone() == (left,)
    file.close()


def test_trims_beyond_the_end_hold(store: CellStore) -> None:
    assert outcomes(store, trim(10), write(9, b"x"), write(10, b"x")) == [DONE, TAKEN, DONE]
    assert store.serve([CellsSeal(0, "s", 1)])[0].end == 11


def test_keys_are_listed_in_pages_of_a_section(store: CellStore) -> None:
    count = CELLS_LISTED_MAX + 5
    store.serve([write(n, b"") for n in range(count)])
    store.serve([CellWrite(0, "s", 1, key(2, 9, GENERATION), b"g")])
    (first,) = store.serve([CellKeysWanted(0, "s", 1, RECORDS)])
    (second,) = store.serve([CellKeysWanted(0, "s", 1, RECORDS, first.listed[-1])])
    assert [k.position for k in (*first.listed, *second.listed)] == list(range(count))
    (notes,) = store.serve([CellKeysWanted(0, "s", 1, GENERATION)])
    assert notes.listed == (key(2, 9, GENERATION),)


def test_what_changes_nothing_is_looked_up_beside_the_transactions(store: CellStore) -> None:
    store.serve([write(n, b"%d" % n) for n in range(4)])
    store.serve([trim(2)])
    for question in (read(0), read(3), read(7), CellKeysWanted(0, "s", 1, RECORDS)):
        assert store.look_up(question) == store.serve([question])[0]
    later = read(3, epoch=2)
    assert store.look_up(later) is None, "it raises the epoch"
    assert store.look_up(write(8, b"x")) is None
    store.serve([later])
    answer = store.look_up(read(3))
    assert answer is not None
    assert answer.outcome is SEALED


def test_a_space_that_was_never_opened_is_absent(store: CellStore) -> None:
    questions: list[CellQuestion] = [
        CellWrite(0, "other", 1, key(0), b"x"),
        CellsSeal(0, "other", 5),
    ]
    assert outcomes(store, *questions) == [ABSENT, ABSENT]


def test_a_damaged_cell_takes_its_own_content_only(store: CellStore, tmp_path: Path) -> None:
    store.serve([write(1, b"right"), write(2, b"other")])
    with sqlite3.connect(tmp_path / "cells") as file:
        file.execute("UPDATE cells SET content = ? WHERE position = 1", (b"wrong",))
    file.close()
    damaged = CellOutcome.DAMAGED
    assert outcomes(store, read(1), write(1, b"new"), read(2)) == [damaged, damaged, DONE]
    assert outcomes(store, write(1, b"right")) == [DONE]
    assert store.serve([read(1)])[0].content == b"right"


def _write_until_killed(path: Path, told: Connection) -> None:
    store = CellStore(path)
    store.serve([CellsSeal(0, "s", 1, opens=True)])
    for position in range(100_000):
        store.serve([write(position, b"%d" % position)])
        told.send(position)


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=_write_until_killed, args=(tmp_path / "cells", theirs)
    )
    child.start()
    assert child.pid is not None
    last = -1
    for _ in range(50):
        last = ours.recv()
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    while ours.poll():
        last = ours.recv()
    reader = CellReader(tmp_path / "cells")
    assert reader.answer(read(last)).content == b"%d" % last, "also from its write-ahead log"
    reader.close()
    store = CellStore(tmp_path / "cells")
    answers = store.serve([read(position) for position in range(last + 1)])
    assert [answer.content for answer in answers] == [b"%d" % n for n in range(last + 1)]
    store.close()


def test_another_version_is_refused(tmp_path: Path) -> None:
    CellStore(tmp_path / "cells").close()
    with sqlite3.connect(tmp_path / "cells") as file:
        file.execute("PRAGMA user_version = 9")
    file.close()
    with pytest.raises(sqlite3.DatabaseError, match="has format 9; this version reads 1"):
        CellStore(tmp_path / "cells")


# --- the shell's part

NODE, ENGINE = NodeId("storage-0"), NodeId("engine-0")


def stores(directory: Path, answers: list[CellAnswer], **limits: int) -> CellStores:
    config = Config(node=node_config(**limits))
    return CellStores(
        directory, config, lambda _, __, answer: answers.append(answer), lambda _is_full: None
    )


@pytest.mark.asyncio
async def test_questions_beyond_the_limits_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, serve = threading.Event(), CellStore.serve

    def serve_later(store: CellStore, questions: Sequence[CellQuestion]) -> list[CellAnswer]:
        assert asked.wait(60)
        return serve(store, questions)

    monkeypatch.setattr(CellStore, "serve", serve_later)
    answers: list[CellAnswer] = []
    served = stores(tmp_path, answers, cell_requests_max=2, cell_request_bytes_max=2_000)
    served.ask(NODE, ENGINE, CellsSeal(1, "s", 1, opens=True))  # under way
    served.ask(NODE, ENGINE, CellWrite(2, "s", 1, key(0), b"x" * 1_000))  # waits
    served.ask(NODE, ENGINE, CellWrite(3, "s", 1, key(1), b"x" * 1_000))  # too many bytes
    served.ask(NODE, ENGINE, CellWanted(4, "s", 1, key(0)))  # waits
    served.ask(NODE, ENGINE, CellWanted(5, "s", 1, key(0)))  # too many
    refused = [answer.request for answer in answers]
    assert refused == [3, 5]
    asked.set()
    async with asyncio.timeout(60):
        while len(answers) < 5:  # noqa: ASYNC110 - a thread answers
            await asyncio.sleep(0.001)
    await served.close()
    assert {a.request: a.outcome for a in answers if a.request in (1, 2, 4)} == {
        1: DONE, 2: DONE, 4: DONE
    }  # fmt: skip


@pytest.mark.asyncio
async def test_on_a_full_disk_trims_work_although_cells_have_used_up_the_reserve(
    tmp_path: Path,
) -> None:
    changes: list[bool] = []
    with small_disk(tmp_path / "disk", 40 * MIB) as disk:
        config = Config(node=node_config(disk_retry_s=0.01, disk_reserve_bytes=MIB))
        answered: dict[int, asyncio.Future[CellAnswer]] = {}
        served = CellStores(
            disk.directory,
            config,
            lambda _, __, answer: answered[answer.request].set_result(answer),
            changes.append,
        )

        async def ask(question: CellQuestion) -> CellOutcome:
            waiter: asyncio.Future[CellAnswer] = asyncio.get_running_loop().create_future()
            answered[question.request] = waiter
            served.ask(NODE, ENGINE, question)
            return (await waiter).outcome

        assert await ask(CellsSeal(0, "s", 1, opens=True)) is DONE
        disk.fill(leave_bytes=MIB)
        end = 0
        while await ask(CellWrite(end + 1, "s", 1, key(end), bytes(64 * KIB))) is DONE:
            end += 1
        assert changes == [True]
        assert await ask(CellWrite(1, "s", 1, key(end), b"a trim is a small cell")) is DONE
        assert await ask(CellsTrim(2, "s", 1, 0, end)) is DONE
        async with asyncio.timeout(60):
            while changes != [True, False]:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.001)
        assert await ask(CellWrite(3, "s", 1, key(end + 1), bytes(64 * KIB))) is DONE
        await served.close()


@pytest.mark.asyncio
async def test_a_lost_disk_has_no_spaces_and_gets_no_file(tmp_path: Path) -> None:
    answers: list[CellAnswer] = []
    served = stores(tmp_path, answers)
    served.ask(NODE, ENGINE, CellWrite(1, "s", 1, key(0), b"x"))
    await served.close()
    served = stores(tmp_path, answers)
    served.ask(NODE, ENGINE, CellWrite(1, "s", 1, key(0), b"x"))
    async with asyncio.timeout(60):
        while not answers:  # noqa: ASYNC110 - a thread answers
            await asyncio.sleep(0.001)
    await served.close()
    assert [answer.outcome for answer in answers] == [ABSENT]
    assert not (tmp_path / "cells").exists()


@pytest.mark.asyncio
async def test_a_file_that_cannot_be_read_refuses_questions(tmp_path: Path) -> None:
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / f"{NODE}.sqlite3").write_bytes(b"not a database" * 100)
    answers: list[CellAnswer] = []
    served = stores(tmp_path, answers)
    served.ask(NODE, ENGINE, CellsSeal(1, "s", 1))
    async with asyncio.timeout(60):
        while not answers:  # noqa: ASYNC110 - a thread answers
            await asyncio.sleep(0.001)
    await served.close()
    assert [answer.outcome for answer in answers] == [CellOutcome.REFUSED]


@pytest.mark.asyncio
async def test_the_names_of_a_new_file_are_synced_before_its_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power loss could take a file with acknowledged cells along."""
    synced: list[Path] = []
    monkeypatch.setattr(cell_store, "synced_directory", synced.append)
    answered: asyncio.Future[list[Path]] = asyncio.get_running_loop().create_future()
    stores = CellStores(
        tmp_path,
        Config(),
        lambda _node, _to, _answer: answered.set_result(list(synced)),
        lambda _is_full: None,
    )
    stores.ask(NodeId("storage-0"), NodeId("engine-0"), CellsSeal(0, "s", 1, opens=True))
    assert await answered == [tmp_path / "cells", tmp_path]
    await stores.close()


def test_the_write_ahead_log_does_not_grow(tmp_path: Path) -> None:
    store, log = CellStore(tmp_path / "cells"), tmp_path / "cells-wal"
    size = log.stat().st_size
    store.serve([CellsSeal(0, "s", 1, opens=True)])
    for position in range(400):
        store.serve([write(position, b"x" * 400)])
    assert log.stat().st_size == size
    copied = tmp_path / "copied"
    copied.mkdir()
    for name in ("cells", "cells-wal"):  # as after a crash, with zeros after the frames
        (copied / name).write_bytes((tmp_path / name).read_bytes())
    again = CellStore(copied / "cells")
    assert {answer.outcome for answer in again.serve([read(n) for n in range(400)])} == {DONE}
    again.serve([write(400, b"y")])
    again.close()
    store.close()
