"""The ordering tier: a primary sequencer and its backups, which agree on the metalog (Scalog 3 and
4.1).

`Sequencer` is the role; inside it is a `Primary`, which turns what storage nodes have stored into
metalog entries, or a `Backup`, which keeps a copy of them.
"""
