"""The read side of a compute node: answers reads locally, or asks the index tier, storage and the
primary. `Engine` uses this package; `Reads` joins its parts.
"""
