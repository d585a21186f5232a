"""Processes that are forked from one that has imported what they need (docs/decisions/0034, 0069).

- `fork_server`: runs in the process that forks
- `fork_starter`: runs a fork server, and lets it fork
- `held_process`: a process that is signalled and awaited by a descriptor
"""
