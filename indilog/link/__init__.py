"""The link between a compute node and its workers and clients: messages, frames and both ends."""
