"""The headers of a forwarded call and of its answer, and what they carry."""

from __future__ import annotations

from typing import Final, NamedTuple

from indilog.base.ids import SeqNum

FORWARDED_HEADER: Final = b"indilog-forwarded"
"""Marks a forwarded call, which is not forwarded again. Its value is the seqnum of the deployment
that the forwarding node runs; a node with an older one refuses the call.
"""
LOAD_HEADER: Final = b"indilog-load"
"""The load of the node that answers: `CALLS/SLOTS`."""
REFUSED_HEADER: Final = b"indilog-refused"
"""In the answer to a forwarded call that was taken and then did not begin."""
INVOCATION_HEADER: Final = b"indilog-invocation"
"""In every answer that has the outcome of a call."""

_DIGITS_MAX: Final = 18


class Load(NamedTuple):
    """How busy a compute node is.

    Attributes:
        calls: calls that hold a slot or wait for one.
        slots: slots of the workers that take calls.
    """

    calls: int
    slots: int

    @property
    def has_room(self) -> bool:
        """Whether a call would start at once, as far as the share of its application allows."""
        return self.calls < self.slots

    def encode(self) -> bytes:
        """Return the value of `LOAD_HEADER`."""
        return b"%d/%d" % self


def load_in(value: bytes) -> Load | None:
    """Return the load that a value of `LOAD_HEADER` says; None if it is malformed."""
    calls, _, slots = value.partition(b"/")
    if not (_is_number(calls) and _is_number(slots)):
        return None
    return Load(int(calls), int(slots))


def deployment_in(value: bytes) -> SeqNum | None:
    """Return the seqnum that a value of `FORWARDED_HEADER` says; None if it is malformed."""
    return int(value) if _is_number(value) else None


def _is_number(value: bytes) -> bool:
    return value.isdigit() and len(value) <= _DIGITS_MAX
