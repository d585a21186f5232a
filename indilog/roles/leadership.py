"""The primary, as one role knows it."""

from __future__ import annotations

from indilog.base.ids import Epoch
from indilog.kernel.view import View
from indilog.roles.role import TermBegun


class Leadership:
    """The newest known term; before the first one, messages go to the first sequencer.

    Attributes:
        term: its number; 0: none is known.
        primary: the sequencer that leads it.
    """

    __slots__ = ("primary", "term")

    def __init__(self, view: View) -> None:
        self.term = Epoch(0)
        self.primary = view.sequencers[0]

    def begin(self, event: TermBegun) -> bool:
        """Note a term; return whether it is newer than the known one."""
        if event.term <= self.term:
            return False
        self.term, self.primary = event
        return True
