"""Frames between processes: Unix sockets, TCP and ZeroMQ."""
