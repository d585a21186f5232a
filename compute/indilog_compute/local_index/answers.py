"""The outcomes of a lookup in the local index (thesis 5.1; ARCHITECTURE 3, "found / empty / miss").

`Found`, `Matches` and `Empty` are proven for the prefix of the log that the index has applied.
`Miss` proves nothing. All parts of the local index return these outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias, final

import msgspec

from indilog.base.ids import SeqNum, ShardId


@final
class Found(msgspec.Struct, frozen=True, gc=False):
    """The record exists: its seqnum, and its shard."""

    seqnum: SeqNum
    shard: ShardId


@final
class Empty(msgspec.Struct, frozen=True, gc=False):
    """Proven: there is no such record ("index cannot exist")."""


@final
class Miss(msgspec.Struct, frozen=True, gc=False):
    """This index does not know the answer: the caller asks the index tier ("index miss")."""


@final
class Matches(msgspec.Struct, frozen=True):
    """The first records from a bound on, ascending, with their shards.

    If there are fewer than requested, it is proven that there are no further ones.
    """

    seqnums: Sequence[SeqNum]
    shards: Sequence[ShardId]


Answer: TypeAlias = Found | Empty | Miss
RangeAnswer: TypeAlias = Matches | Miss

EMPTY: Final = Empty()
MISS: Final = Miss()
