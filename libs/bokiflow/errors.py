"""What a person's use of workflows and locks can meet beside the errors of the log."""

from __future__ import annotations

from indilog.errors import IndilogError


class FlowError(IndilogError):
    """Base of the errors of BokiFlow."""


class FlowVersionError(FlowError):
    """A record was written by a later version of BokiFlow; upgrade this program to read it."""
