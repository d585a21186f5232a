"""Movie reviews, the "media" workload of the Boki paper, as functions on the log.

`app` has the functions and is all that the platform needs; the other modules are for the demo
(`python -m functions.media.demo`).
"""
