"""Carries frames between processes, over Unix sockets, TCP and ZeroMQ.

`indilog.runtime.node.NodeShell` sends and receives them; `node_process` chooses the transport.
"""
