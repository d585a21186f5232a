"""Durable asynchronous invocations, idempotency keys and schedules. Requests and outcomes are
records of the reserved log `$invocations` (docs/decisions/0018).

`records` defines the format. `fold` derives the state of all invocations from the records, alike on
every compute node. `executor` decides what one node does next (`now` in, actions out), with
`scheduling` for schedules. `service` performs these actions, with `runs` (invocations running here)
and `outcome_waiters` (waiting callers). `checkpoint` encodes the fold as records; `checkpoints`
writes and reads them, and trims what they replace.
"""
