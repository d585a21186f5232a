"""Durable asynchronous invocations, idempotency keys and schedules. Requests and outcomes are
records of the reserved log `$invocations` (docs/decisions/0018).

`records` defines the format. `invocation_table` derives the state of all invocations from the
records; every compute node derives the same state. `executor` decides the next actions of one node
from the table and the time; `scheduling` decides which schedules are due. `service` performs the
actions. For this it uses `runs` (invocations that run here) and `outcome_waiters` (waiting
callers). `checkpoint` encodes the table as records. `checkpoints` writes and reads these records,
and trims the records that they replace. `workers.host` calls `InvocationService`.
"""
