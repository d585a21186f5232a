"""The read side of a compute node: local answers, and questions to index tier, storage and
primary.
"""
