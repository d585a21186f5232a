"""The processes that form a platform: assembly, supervisor, metadata and the data directory.

The command line, the clients and the test tools start platforms through this package.
"""
