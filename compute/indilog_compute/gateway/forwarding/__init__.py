"""Runs calls on other compute nodes when this node has no room for them (docs/decisions/0051).

- `peers`: decides, without I/O, which compute node to ask
- `headers`: the headers of a forwarded call and of its answer
- `connection`: one HTTP connection to another compute node's gateway
- `connections`: opens these connections, and keeps idle connections
- `forwarder`: offers a call to other nodes, and returns the answer
- `offers`: decides whether this node takes a call that another node offers

A gateway offers a call by a request with `Expect: 100-continue`, without its body. A node with room
answers `100 Continue`, and then gets the body. Any other answer refuses the call, and contains the
number of calls that the node has. A node never executes a request without its body, so a refused
call certainly did not run. `InvokeEndpoint` (`gateway.invoke`) uses `Forwarder` and `Offers`.
"""

from indilog_compute.gateway.forwarding.connection import PeerAnswer
from indilog_compute.gateway.forwarding.forwarder import ForwardedCall, Forwarder
from indilog_compute.gateway.forwarding.headers import (
    FORWARDED_HEADER,
    INVOCATION_HEADER,
    REFUSED_HEADER,
)
from indilog_compute.gateway.forwarding.offers import Offers
from indilog_compute.gateway.forwarding.peers import PeerPort, Peers

__all__ = [
    "FORWARDED_HEADER",
    "INVOCATION_HEADER",
    "REFUSED_HEADER",
    "ForwardedCall",
    "Forwarder",
    "Offers",
    "PeerAnswer",
    "PeerPort",
    "Peers",
]
