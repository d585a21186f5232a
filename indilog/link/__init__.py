"""The link between a compute node and its workers and clients: messages, frames and both ends.

Workers and the gateway (`indilog_compute`) use it, and clients (`indilog.remote_client`).
"""
