"""Workflow runs, and the operations of applications that show and steer them."""

from indilog_compute.gateway.runs.operations import Operations
from indilog_compute.gateway.runs.routes import runs_router

__all__ = ["Operations", "runs_router"]
