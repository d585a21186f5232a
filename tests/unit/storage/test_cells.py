"""What a storage node does about questions for write-once cells."""

from __future__ import annotations

import pytest

from indilog.base.ids import Epoch, Instant, NodeId
from indilog.config import Config
from indilog.kernel.view import view_of
from indilog.roles.role import AskCells, CellsAnswered, Ignore, Received, Send, SpaceChanged
from indilog.wire.cell_messages import (
    CellAnswer,
    CellKey,
    CellOutcome,
    CellQuestion,
    CellsDrop,
    CellsSeal,
    CellsTrim,
    CellWanted,
    CellWrite,
)
from indilog_storage.node import StorageNode
from tests.unit.storage.machine import ENGINE

WRITE = CellWrite(5, "s", 1, CellKey(0, 3), b"x")
READ = CellWanted(6, "s", 1, CellKey(0, 3))


def node_of() -> StorageNode:
    view = view_of()
    return StorageNode(view.storage_nodes[0], [view], Config())


def effects(node: StorageNode, question: CellQuestion, sender: NodeId = ENGINE) -> list[object]:
    received = Received(sender, question, Epoch(1))
    handled = node.handle([received], Instant(1.0))
    return [e for e in handled if isinstance(e, AskCells | Send | Ignore)]


def test_a_question_goes_to_the_cells_and_its_answer_to_the_sender() -> None:
    node = node_of()
    assert effects(node, WRITE) == [AskCells(ENGINE, WRITE)]
    answer = CellAnswer(5, CellOutcome.DONE)
    assert Send(ENGINE, answer) in node.handle([CellsAnswered(ENGINE, answer)], Instant(1.0))


def test_only_compute_nodes_may_ask() -> None:
    (ignored,) = effects(node_of(), WRITE, NodeId("storage-7"))
    assert isinstance(ignored, Ignore)


def test_a_full_disk_refuses_new_logs() -> None:
    node = node_of()
    node.handle([SpaceChanged(1_000)], Instant(1.0))
    opens = CellsSeal(7, "s", 1, opens=True)
    assert effects(node, opens) == [Send(ENGINE, CellAnswer(7, CellOutcome.REFUSED))]
    trim, seal, drop = CellsTrim(8, "s", 1, 0, 9), CellsSeal(9, "s", 1), CellsDrop(10, "s")
    for question in (READ, WRITE, trim, seal, drop):
        assert effects(node, question) == [AskCells(ENGINE, question)]


@pytest.mark.parametrize(
    "question",
    [
        CellWrite(1, "s", 1, CellKey(0, -1), b""),
        CellWrite(1, "s", 1 << 70, CellKey(0, 1), b""),
        CellWrite(1, "", 1, CellKey(0, 1), b""),
        CellWrite(1, "s" * 600, 1, CellKey(0, 1), b""),
        CellWanted(1, "s", 1, CellKey(0, 1, 1 << 63)),
        CellsTrim(1, "s", 1, 0, 1 << 64),
        CellsDrop(1, ""),
    ],
)
def test_impossible_numbers_and_names_are_ignored(question: CellQuestion) -> None:
    (ignored,) = effects(node_of(), question)
    assert isinstance(ignored, Ignore)
