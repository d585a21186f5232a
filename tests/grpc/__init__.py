"""Clients of the gRPC interface: a `Log`, and a program in another language."""
