"""How worker processes start (docs/decisions/0069).

- `worker_starter`: forks or executes workers
- `fork_server`: the process that forks them
- `environment`: selects the environment variables of a worker
- `worker_process`: the main function of a worker
"""
