"""The messages about the nodes of the cluster and the replicas of shards (decisions 0048, 0049).

`indilog.wire.messages` says how to read them. Storage nodes send them to primaries, index
nodes and aggregators.
"""

from __future__ import annotations

from indilog.base.ids import Epoch, MetalogPosition, ShardId
from indilog.kernel.metalog import Replicas
from indilog.kernel.view import View
from indilog.wire.wire_message import WireMessage


class StorageAlive(WireMessage, frozen=True):
    """storage → primary: the heartbeat of a storage node.

    `position`: how many entries are applied. `complete`: shards of which the node has every record
    that these entries ordered, except those that no replica has. `has_room`: whether its disk has
    room for batches. `term` is the newest one that the sender knows.
    Lost: a node without a heartbeat for `storage_lost_s` counts as lost.
    Repeated: absolute.
    """

    term: Epoch
    position: MetalogPosition
    complete: tuple[ShardId, ...]
    has_room: bool = True


class PlacementIs(WireMessage, frozen=True):
    """storage → index, aggregator: the view, and the replicas of the shards that metalog entries
    moved.

    Storage nodes send it when they apply an entry that changes the view or replicas, and with their
    first answer to an incarnation of the receiver; two of them also send it periodically.
    Lost: the next one is equal or newer. Until then, reads are sent to a replica that may be lost,
        and the engine repeats them; lookups that name a newer view wait.
    Repeated: the receiver keeps the newest view, and for each shard the replicas of the latest
        entry.
    """

    view: View
    replicas: dict[ShardId, Replicas]
