"""The primary, as one role knows it. Roles that send messages to the primary use it."""

from __future__ import annotations

from indilog.base.ids import Epoch, NodeId
from indilog.kernel.view import View
from indilog.roles.role import TermBegun


class Leadership:
    """The newest known term; before the first one, messages go to the first sequencer.

    Attributes:
        term: number of the term; 0: none is known.
        primary: the sequencer that leads it.
    """

    __slots__ = ("primary", "term")

    def __init__(self, view: View) -> None:
        self.term = Epoch(0)
        self.primary = view.sequencers[0]

    def begin(self, event: TermBegun, sender: NodeId | None = None) -> bool:
        """Note a term; return whether this role must resend all reports to its primary.

        It must if the term is newer than the known one. It also must if the primary itself
        (`sender`) announces the term, because a primary ignores reports that arrived before it knew
        its term.
        """
        if event.term < self.term or (event.term == self.term and sender != self.primary):
            return False
        self.term, self.primary = event
        return True
