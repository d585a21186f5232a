"""What `bench.flow_peers` deploys on each side: the same five things, written as each side's own
documentation writes them. The peers' run in an environment of their own (requirements/peers.in).
"""
