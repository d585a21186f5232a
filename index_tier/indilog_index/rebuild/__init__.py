"""The rebuild of index snapshots from records (thesis 5.6.2, decision 0035): what a snapshot covers
(`plan`), and rows sorted with bounded memory (`sorted_runs`).

It is used by programs that read a data directory, not by nodes.
"""
