"""Bugs in changes of the sequencers; `tests.simulation.planted` plants them."""

from __future__ import annotations

from typing import Final

CHANGE_BUGS: Final = (
    (
        "a sequencer is added while another addition is not committed",
        "ordering/indilog_ordering/leader.py",
        "if not (self.settled and self._metalog.view_end <= self.committed):",
        "if not self.settled:",
    ),
    (
        "a sequencer is removed before the fence is committed",
        "ordering/indilog_ordering/leader.py",
        "if not (self.settled and self._metalog.view_end <= self.committed):",
        "if not (self._metalog.view_end <= max(self.committed, self.recovered)):",
    ),
    (
        "a majority of the sequencers before a change commits",
        "ordering/indilog_ordering/leader.py",
        "            self._majority = majority(self.nodes)\n",
        "            self._majority = majority(before)\n",
    ),
    (
        "a node that is to be a sequencer counts",
        "ordering/indilog_ordering/member_progress.py",
        "return self.elects and self.voter",
        "return self.voter",
    ),
    (
        "a primary that has been removed counts",
        "ordering/indilog_ordering/leader.py",
        "return promised and not self._metalog.learner and self._node in self.nodes",
        "return promised and not self._metalog.learner",
    ),
    (
        "the sequencers of an adopted copy are not sealed",
        "ordering/indilog_ordering/leader.py",
        "if frozenset(self.nodes) == self._chosen_by:",
        "if self._chosen_by:",
    ),
)
"""The name, the file, the source text that is replaced, and its replacement."""
