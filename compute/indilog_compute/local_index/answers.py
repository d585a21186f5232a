"""The outcomes of a lookup in the local index (thesis 5.1; ARCHITECTURE 3, "found / empty / miss").

Found and empty are proven for the prefix of the log that the index has applied; a miss proves
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias, final

import msgspec

from indilog.base.ids import SeqNum, ShardId


@final
class Found(msgspec.Struct, frozen=True, gc=False):
    """The seqnum of the record, and the shard that holds it."""

    seqnum: SeqNum
    shard: ShardId


@final
class Empty(msgspec.Struct, frozen=True, gc=False):
    """Proven: there is no such record ("index cannot exist")."""


@final
class Miss(msgspec.Struct, frozen=True, gc=False):
    """Not known here: ask the index tier ("index miss")."""


@final
class Matches(msgspec.Struct, frozen=True):
    """The first records from a bound on, ascending, with their shards.

    If they are fewer than requested, it is proven that there are no more.
    """

    seqnums: Sequence[SeqNum]
    shards: Sequence[ShardId]


Answer: TypeAlias = Found | Empty | Miss
RangeAnswer: TypeAlias = Matches | Miss

EMPTY: Final = Empty()
MISS: Final = Miss()
