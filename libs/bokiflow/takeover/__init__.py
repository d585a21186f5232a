"""Executors, their heartbeats, and the takeover of runs whose executor is dead."""
