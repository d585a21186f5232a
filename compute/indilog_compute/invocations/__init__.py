"""Durable asynchronous invocations, idempotency keys and schedules: what is to run, and what came
of it, as records of the reserved log `$invocations` (docs/decisions/0018).

`records` is the format; `fold` says what the records mean, alike on every compute node; `executor`
decides what one node does next (`now` in, actions out), with `scheduling` for schedules; `service`
does it, with `runs` (those that run here) and `outcome_waiters` (callers that wait). `checkpoint`
has the fold as records, `checkpoints` writes, reads and trims.
"""
