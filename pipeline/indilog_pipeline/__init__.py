"""Programs beside the platform that read a data directory as a whole: record batches for analytics,
exports, backups, and the rebuild of index snapshots.

They restore state as a node does at its start (checkpoints, replay of the journal). Reading takes
no lock and changes nothing in a directory; only a rebuild installs new snapshots. The commands of
`indilog.cli` call these programs. Nodes do not import this package.
"""
