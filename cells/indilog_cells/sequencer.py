"""The token sequencer: a counter without I/O (CORFU 2.3, ZLog).

A token names a cell that this sequencer gave to no other caller. Tokens are for speed only: if two
writers write one cell, the cell takes the content of one of them (decision 0077). So a new
sequencer may begin at any cell, and nothing is lost with a sequencer.
"""

from __future__ import annotations


class TokenSequencer:
    """Gives each cell to one writer.

    Args:
        start: the first cell to give; best the first unwritten one.
    """

    def __init__(self, start: int = 0) -> None:
        self.next = start

    def take(self, at_least: int = 0) -> int:
        """Return a cell that this sequencer has not given before.

        Args:
            at_least: the caller knows that all cells below are written.
        """
        position = max(self.next, at_least)
        self.next = position + 1
        return position
