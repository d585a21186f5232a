"""Programs beside the platform that read a data directory as a whole: record batches for analytics,
and the rebuild of index snapshots.

They restore state as a node does at its start (checkpoints, replay of the journal), and change
nothing in a directory. Nodes do not import this package.
"""
