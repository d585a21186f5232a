"""The read side of a compute node."""
