"""The compute tier (ARCHITECTURE 8 to 10, thesis 5). The engine appends and reads for the functions
of its node, the workers run them, and the gateway serves callers.

`Engine` is the role; `local_log` is the log as callers in this process see it.
"""
