"""The compute tier (ARCHITECTURE 8 to 10, thesis 5). The engine appends and reads for the functions
of its node, the workers run them, and the gateway serves callers.

`Engine` is the role that a node's shell drives. `local_log` implements `Log` over the engine, for
callers in this process. `indilog.runtime.cluster.assembly` builds all parts.
"""
