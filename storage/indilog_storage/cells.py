"""Questions of compute nodes about the write-once cells of a storage node (decision 0085).

The shell keeps the cells (`indilog.runtime.cell_store`). `StorageNode` calls `serve_cells` for each
question. `serve_cells` checks the sender, the numbers and the room on disk, and then passes the
question to the shell. On a full disk cells are still written, with the room of a reserve: compute
nodes then write no records, but trims, and the records in progress.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, assert_never

from indilog.base.ids import NodeId
from indilog.roles.role import AskCells, Effect, Ignore, Received, Send
from indilog.wire.cell_messages import (
    CellAnswer,
    CellKey,
    CellKeysWanted,
    CellOutcome,
    CellQuestion,
    CellsDrop,
    CellsSeal,
    CellsTrim,
    CellWanted,
    CellWrite,
)

_NUMBER_MAX: Final = 1 << 62
_SPACE_CHARACTERS_MAX: Final = 512


def serve_cells(
    event: Received, question: CellQuestion, engines: Collection[NodeId], *, has_room: bool
) -> Effect:
    """Return the effect that answers, refuses or ignores a question.

    Args:
        event: the event with the question.
        question: the question.
        engines: the compute nodes of the view.
        has_room: whether the disk has room; otherwise no new log is opened.
    """
    if event.sender not in engines:
        return Ignore(event, "a question about cells of a node that is no compute node")
    if not _is_valid(question):
        return Ignore(event, "a question about cells with numbers or names that no cell has")
    if not has_room and isinstance(question, CellsSeal) and question.opens:
        return Send(event.sender, CellAnswer(question.request, CellOutcome.REFUSED))
    return AskCells(event.sender, question)


def _is_valid(question: CellQuestion) -> bool:
    numbers = [question.epoch]
    match question:
        case CellsTrim(section=section, until=until):
            numbers += [section, until]
        case CellKeysWanted(section=section, after=after):
            numbers += [section, *_numbers(after)]
        case CellsSeal() | CellsDrop():
            pass
        case CellWrite(key=key) | CellWanted(key=key):
            numbers += _numbers(key)
        case unreachable:
            assert_never(unreachable)
    is_named = 0 < len(question.space) <= _SPACE_CHARACTERS_MAX
    return is_named and all(0 <= number < _NUMBER_MAX for number in numbers)


def _numbers(key: CellKey | None) -> list[int]:
    return [] if key is None else [key.section, key.position, key.part]
