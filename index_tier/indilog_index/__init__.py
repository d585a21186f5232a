"""The index tier: index nodes, which keep the tags of their metalog positions, and aggregators,
which merge what all index shards answer (thesis 5.2 to 5.4, ARCHITECTURE 9).

`IndexNode` and `Aggregator` are the roles.
"""
