"""Starts worker processes: their environment, and what a worker process runs."""
