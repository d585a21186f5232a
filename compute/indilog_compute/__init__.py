"""The compute tier: the engine, which appends and reads for the functions of its node, the workers
that run them, and the gateway that faces callers (ARCHITECTURE 8 to 10, thesis 5).

`Engine` is the role; `local_log` is the log as callers in this process see it.
"""
