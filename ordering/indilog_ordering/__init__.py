"""The ordering tier: a primary sequencer and its backups, which agree on the metalog (Scalog 3 and
4.1).

`Sequencer` is the role. It contains a `Primary`, which makes metalog entries of what storage nodes
have stored, or a `Backup`, which stores a copy of the entries. A `Rebuild` is a primary that first
fetches entries that its disk lost.
"""
