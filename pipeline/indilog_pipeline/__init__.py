"""Programs beside the platform that read a data directory as a whole: record batches for analytics,
and the rebuild of index snapshots.

They use what nodes use to start (checkpoints, replay of the journal), and change nothing in a
directory. Nodes do not import this package.
"""
