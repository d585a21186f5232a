"""Which nodes have told this compute node that their disks are full: then it takes no appends
(ARCHITECTURE 11, decision 0009).
"""

from __future__ import annotations

from indilog.base.errors import DiskFullError
from indilog.base.ids import Instant, NodeId
from indilog.roles.disk_full import BELIEVED_S


class FullDisks:
    """Believes each node for a while; one that is still full says so again.

    Attributes:
        until: the full ones, and until when each is believed; each append looks whether there are.
    """

    __slots__ = ("until",)

    def __init__(self) -> None:
        self.until: dict[NodeId, Instant] = {}

    def __bool__(self) -> bool:
        """Whether any disk is full."""
        return bool(self.until)

    def told(self, node: NodeId, *, full: bool, now: Instant) -> None:
        """Take note of what `node` says."""
        if full:
            self.until[node] = Instant(now + BELIEVED_S)
        else:
            self.until.pop(node, None)

    def expire(self, now: Instant) -> None:
        """Forget what was not said again."""
        if self.until and min(self.until.values()) <= now:
            self.until = {node: until for node, until in self.until.items() if until > now}

    def error(self) -> DiskFullError:
        """Return what a caller is told whose append is refused."""
        return DiskFullError(
            f"There is no disk space left on {', '.join(sorted(self.until))}; nothing was "
            "appended. Make room: the log takes appends again by itself."
        )

    def deadline(self) -> Instant | None:
        """When the next one is to be forgotten."""
        return min(self.until.values()) if self.until else None
