"""The token sequencer: a counter without I/O (CORFU 2.3, ZLog).

A token names a cell that no other caller was given. Tokens are for speed only: of two writers of
one cell, the cell accepts one (decision 0077). So a new sequencer may begin anywhere, and a lost
one loses nothing.
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
        """Return a cell that was not given before.

        Args:
            at_least: the caller knows that all cells below are written.
        """
        position = max(self.next, at_least)
        self.next = position + 1
        return position
