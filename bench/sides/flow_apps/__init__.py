"""The applications of `bench.flow_peers`, one for each side: the same five operations, written as
in the side's own documentation. The applications of the peers run in an environment of their own
(requirements/peers.in).
"""
