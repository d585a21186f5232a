"""Questions of a compute node about write-once cells."""

from __future__ import annotations

import pytest

from indilog.base.errors import NotReadyError, OverloadedError, QuorumUnavailableError
from indilog.base.ids import Instant, NodeId
from indilog.config import node_config
from indilog.roles.role import Answer, Ignore, Send
from indilog.wire.cell_messages import CellAnswer, CellKey, CellOutcome, CellWanted
from indilog_compute.cell_questions import CellQuestions

NODE, OTHER = NodeId("storage-0"), NodeId("storage-1")
READ = CellWanted(0, "s", 1, CellKey(0, 3))


def asking(**settings: float) -> CellQuestions:
    made = CellQuestions(node_config(resend_s=0.1, **settings))
    made.number_from(100)
    return made


def test_an_answer_goes_to_its_question() -> None:
    cells = asking()
    cells.ask(NODE, READ, "first")
    cells.ask(OTHER, READ, "second")
    sent = cells.advance(Instant(1.0))
    assert [(s.to, s.message.request) for s in sent if isinstance(s, Send)] == [  # type: ignore[union-attr]
        (NODE, 101), (OTHER, 102)
    ]  # fmt: skip
    answer = CellAnswer(102, CellOutcome.UNWRITTEN)
    assert cells.on_answer(OTHER, answer) == [Answer("second", answer)]
    assert cells.on_answer(OTHER, answer) == [], "the second answer finds no question"
    (ignored,) = cells.on_answer(OTHER, CellAnswer(101, CellOutcome.DONE))
    assert isinstance(ignored, Ignore), "another node was asked"


def test_a_question_is_resent_and_fails_at_its_deadline() -> None:
    cells = asking(cell_timeout_s=1.0)
    cells.ask(NODE, READ, "waiter")
    (sent,) = cells.advance(Instant(1.0))
    assert cells.advance(Instant(1.05)) == []
    assert cells.deadline() == pytest.approx(1.1)
    assert cells.advance(Instant(1.2)) == [sent]
    (failed,) = cells.advance(Instant(2.0))
    assert isinstance(failed, Answer)
    assert isinstance(failed.outcome, QuorumUnavailableError)
    assert not cells
    assert cells.deadline() is None


def test_questions_are_limited_and_end_with_the_node() -> None:
    cells = asking(lookups_pending_max=2)
    cells.ask(NODE, READ, "a")
    cells.ask(NODE, READ, "b")
    with pytest.raises(OverloadedError):
        cells.ask(NODE, READ, "c")
    error = NotReadyError("stops")
    assert cells.abandon(error) == [Answer("a", error), Answer("b", error)]
    cells.check_invariants()
