"""Routes that show and change workflow runs through the operations of their applications."""

from indilog_compute.gateway.runs.operations import OperationCalls
from indilog_compute.gateway.runs.routes import runs_router

__all__ = ["OperationCalls", "runs_router"]
