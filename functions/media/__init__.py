"""Movie reviews as functions on the log: the "media" workload of the Boki paper.

Only `app`, which has the functions, is deployed. The other modules are for the demo (`python -m
functions.media.demo`).
"""
