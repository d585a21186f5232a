"""The version of this release of IndiLog."""

__version__ = "0.1.0"
