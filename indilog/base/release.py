"""The release of IndiLog that this is."""

__version__ = "0.1.0"
