"""The index tier (thesis 5.2 to 5.4, ARCHITECTURE 9). Index nodes keep the tags of their metalog
positions. Aggregators merge the answers of all index shards.

`IndexNode` and `Aggregator` are the roles; a shell of `indilog.runtime` runs them. Storage nodes
send index data, and engines send lookups.
"""
