"""Function workers: processes that run deployed functions, and the host that manages them
(ARCHITECTURE 1, 8; docs/decisions/0003, 0014).

In the compute node's process:

- `host`: `FunctionHost`, which the gateway calls
- `applications`: deploys applications, and follows deployments of other nodes
- `loading`: imports code in workers; new code first in a separate process
- `dispatch`: decides, without I/O, which worker runs which call
- `router`: sends calls to workers, with timers and outcomes
- `liveness_probe`: detects a blocked worker
- `pool`: keeps the worker processes running
- `process`: one worker process and its link
- `in_process`: a worker in this process, for tests
- `scale`: decides, without I/O, how many worker processes run
- `serving`: answers questions that arrive over a link
- `call`: a deployed application, and one call
- `service_states`: the state of services
- `retries`: when an application that did not load is imported again
- `refusals`: errors about applications that are not deployed, do not load, or have another owner
- `starting.environment`: selects the environment variables of a worker

In a worker process:

- `__main__`, `starting.worker_process`: the program of the process
- `runner`: runs calls
- `threads`: runs sync functions
- `services`: runs coroutines while their version is deployed
- `loader`: imports deployed sources

Both kinds of processes use `claims` (memory that shows which calls have begun), `output` (lines
that functions write) and `crash_location` (the line at which a worker crashed).
`indilog_compute.invocations` has the recorded invocations, which `FunctionHost` also serves.
"""
