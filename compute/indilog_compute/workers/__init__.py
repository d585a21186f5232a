"""Function workers: processes that run people's functions, and the host that keeps them
(ARCHITECTURE 1, 8; docs/decisions/0003, 0014).

In the compute node's process: `host` (`FunctionHost`, what the gateway calls), `applications` (what
is deployed, here and on other nodes), `loading` (has code imported, first where it harms no
running call), `dispatch` (which worker runs which call, a pure machine), `router` (the calls'
links, timers and outcomes), `liveness_probe` (notices a blocked worker), `pool` (keeps the
processes up), `process` (one worker process and its link), `serving` (what a link may ask), `call`
(what is deployed and called), `service_figures` (how services are); `indilog_compute.invocations`
has what is recorded to run. On both sides: `claims` (which calls are begun). In a worker process:
`__main__`, `runner` (runs calls), `threads` (for sync functions), `services` (coroutines that run
while their version is deployed), `loader` (imports deployed sources), `crash_location` (where it
was when it ended).
"""
