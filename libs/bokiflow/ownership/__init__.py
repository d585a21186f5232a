"""Executors, the partitions that they own, and the takeover of partitions of dead executors."""
