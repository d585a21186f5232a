"""Which sequencer a role regards as the primary."""

from __future__ import annotations

from indilog.base.ids import Epoch, NodeId
from indilog.kernel.view import view_of
from indilog.roles.leadership import Leadership
from indilog.roles.role import TermBegun

A, B, C = (NodeId(f"sequencer-{number}") for number in range(3))


def test_messages_go_to_the_first_sequencer_until_a_term_is_known() -> None:
    leadership = Leadership(view_of(sequencers=3))
    assert (leadership.term, leadership.primary) == (0, A)


def test_only_a_newer_term_changes_the_primary() -> None:
    leadership = Leadership(view_of(sequencers=3))
    assert leadership.begin(TermBegun(Epoch(5), B))
    assert not leadership.begin(TermBegun(Epoch(5), B))
    assert not leadership.begin(TermBegun(Epoch(4), C))
    assert (leadership.term, leadership.primary) == (5, B)


def test_a_primary_that_announces_its_term_gets_all_reports_again() -> None:
    """A role may learn of a term before the primary does, and what it then sends is lost."""
    leadership = Leadership(view_of(sequencers=3))
    leadership.begin(TermBegun(Epoch(5), B))
    assert leadership.begin(TermBegun(Epoch(5), B), sender=B)
    assert not leadership.begin(TermBegun(Epoch(5), B), sender=C)
    assert not leadership.begin(TermBegun(Epoch(4), C), sender=C)
