"""Replaces a running platform in tests of functions and libraries: `import indilog.testing`.

See docs/guides/testing.md.
"""

from indilog.testing.embedded_cluster import Cluster, cluster
from indilog.testing.faked_context import FakedContext, Sent, context
from indilog.testing.memory_log import MemoryLog, MemoryLogs

__all__ = [
    "Cluster",
    "FakedContext",
    "MemoryLog",
    "MemoryLogs",
    "Sent",
    "cluster",
    "context",
]
