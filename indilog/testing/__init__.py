"""What tests of functions and libraries use instead of a running platform."""

from indilog.testing.memory_log import MemoryLog, MemoryLogs

__all__ = ["MemoryLog", "MemoryLogs"]
