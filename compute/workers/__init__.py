"""Function workers: processes that run people's functions, and the host that keeps them
(ARCHITECTURE 1, 8; docs/decisions/0003).

In the compute node's process: `host` (`FunctionHost`, what the gateway calls), `dispatch` (who runs
what, a pure machine), `process` (one worker process and its link), `deployed` (what is deployed
here), `invocations` (results of asynchronous calls). In a worker process: `__main__`, `runner`
(runs calls), `loader` (imports deployed sources).
"""
