"""The processes that form a platform: assembly, supervisor, metadata and the data directory."""
