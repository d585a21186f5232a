"""The headers of a forwarded call and of its answer, and the values of these headers.

`Forwarder` sends and reads them on one node, and `Offers` on the other node.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from indilog.base.ids import SeqNum

FORWARDED_HEADER: Final = b"indilog-forwarded"
"""Marks a forwarded call, which is not forwarded again. The value is the seqnum of the deployment
that the forwarding node runs. A node with an older deployment refuses the call.
"""
LOAD_HEADER: Final = b"indilog-load"
"""The load of the answering node: `CALLS/SLOTS`."""
REFUSED_HEADER: Final = b"indilog-refused"
"""Marks the answer of a node that took a forwarded call, but did not begin it."""
INVOCATION_HEADER: Final = b"indilog-invocation"
"""Marks an answer with the outcome of a call; the value is the id of the invocation."""

_DIGITS_MAX: Final = 18


class NodeLoad(NamedTuple):
    """How busy a compute node is.

    Attributes:
        calls: number of calls that hold a slot or wait for a slot.
        slots: number of slots of all workers that take calls.
    """

    calls: int
    slots: int

    @property
    def has_room(self) -> bool:
        """Whether a call would start at once, unless its application has used up its share."""
        return self.calls < self.slots

    def encode(self) -> bytes:
        """Return the value of `LOAD_HEADER`."""
        return b"%d/%d" % self


def load_in(value: bytes) -> NodeLoad | None:
    """Return the load in a value of `LOAD_HEADER`; None: the value is malformed."""
    calls, _, slots = value.partition(b"/")
    if not (_is_number(calls) and _is_number(slots)):
        return None
    return NodeLoad(int(calls), int(slots))


def deployment_in(value: bytes) -> SeqNum | None:
    """Return the seqnum in a value of `FORWARDED_HEADER`; None: the value is malformed."""
    return int(value) if _is_number(value) else None


def _is_number(value: bytes) -> bool:
    return value.isdigit() and len(value) <= _DIGITS_MAX
