"""Movie reviews, the "media" workload of the Boki paper, as functions on the log.

The platform needs only `app`, which has the functions. The other modules are for the demo (`python
-m functions.media.demo`).
"""
