"""What tests of functions and libraries use instead of a running platform (API.md, "Testing without
a server"): `import indilog.testing`.
"""

from indilog.testing.embedded_cluster import cluster
from indilog.testing.memory_log import MemoryLog, MemoryLogs

__all__ = ["MemoryLog", "MemoryLogs", "cluster"]
