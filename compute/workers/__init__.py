"""Function workers: processes that run people's functions, and the host that keeps them
(ARCHITECTURE 1, 8; docs/decisions/0003).

In the compute node's process: `host` (`FunctionHost`, what the gateway calls), `dispatch` (who runs
what, a pure machine), `router` (the calls' links, timers and outcomes), `pool` (keeps the
processes up), `process` (one worker process and its link), `loading` (has code imported, first
where it can harm nobody), `serving` (what a link may ask), `call` (what is deployed and called),
`invocations` (results of asynchronous calls). In a worker process: `__main__`, `runner` (runs
calls), `loader` (imports deployed sources), `last_words` (where it was when it ended).
"""
