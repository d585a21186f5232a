"""Function workers: processes that run deployed functions, and the host that manages them
(ARCHITECTURE 1, 8; docs/decisions/0003, 0014).

In the compute node's process:

- `host`: `FunctionHost`, which the gateway calls
- `applications`: which applications are deployed, here and by other nodes
- `loading`: imports code in workers, new code first in a process of its own
- `dispatch`: which worker runs which call, without I/O
- `router`: links, timers and outcomes of the calls
- `liveness_probe`: detects a blocked worker
- `pool`, `process`: keep the worker processes running; one process and its link
- `serving`: answers questions that arrive over a link
- `call`: a deployed application, and one call
- `service_figures`: the state of services

`indilog_compute.invocations` has the recorded invocations. Both sides use `claims` (which calls
have begun). In a worker process:

- `__main__`, `runner`: run calls
- `threads`: runs sync functions
- `services`: runs coroutines while their version is deployed
- `loader`: imports deployed sources
- `crash_location`: the line at which the process crashed
"""
