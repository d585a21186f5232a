"""Replayed state machines: a sub-stream of a log as state, on any process, from any start.

For authors of libraries. A library writes commands as records with one tag, and derives its state
from them with a pure function. The sources are Boki (SOSP 2021, section 5) and Tango (SOSP 2013,
section 3). `State` is that function. `Replica` keeps one process's copy of the state: it reads new
records and returns the outcomes of its own appends. It also starts from checkpoints, writes them,
and trims the records that they replace.

- Time is `Record.ordered_at`. A state that used a clock, or `Record.time`, would differ between
  processes.
- A checkpoint is a cache of what the log says, never the only source. It covers records that were
  applied before it was written. Records are trimmed only when two checkpoints cover them.
- `ReplicaCache` shares one replica among all callers of a process. `scope_of` identifies the
  platform of a log, and refuses a value that is no log.
- `retry_transient` repeats an operation that fails with a transient error.
"""

from indilog.replayed.cache import ReplicaCache, scope_of
from indilog.replayed.checkpoints import SubStream
from indilog.replayed.replica import Replica, State
from indilog.replayed.retry import RetryPolicy, retry_transient

__all__ = [
    "Replica",
    "ReplicaCache",
    "RetryPolicy",
    "State",
    "SubStream",
    "retry_transient",
    "scope_of",
]
