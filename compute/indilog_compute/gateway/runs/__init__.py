"""Routes that show and change workflow runs, by operations of the runs' applications.

`app.create_gateway` adds the routes. `operations` runs the operations through `InvokeEndpoint`.
"""

from indilog_compute.gateway.runs.operations import OperationCalls
from indilog_compute.gateway.runs.routes import runs_router

__all__ = ["OperationCalls", "runs_router"]
