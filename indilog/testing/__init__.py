"""Replaces a running platform in tests of functions and libraries: `import indilog.testing`.

See API.md, "Testing without a server".
"""

from indilog.testing.embedded_cluster import cluster
from indilog.testing.memory_log import MemoryLog, MemoryLogs

__all__ = ["MemoryLog", "MemoryLogs", "cluster"]
