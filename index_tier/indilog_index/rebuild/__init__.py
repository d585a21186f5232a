"""Rebuilds index snapshots from records (thesis 5.6.2, decision 0035): computes the extent of a
snapshot (`plan`), and sorts its rows with bounded memory (`sorted_runs`).

Programs that read a data directory use this package; nodes do not.
"""
