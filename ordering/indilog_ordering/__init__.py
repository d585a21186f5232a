"""The ordering tier: sequencers that agree on the metalog (Scalog 3 and 4.1).

`Sequencer` is the role; a shell of `indilog.runtime` runs it. Each sequencer takes part in the
consensus core (`Consensus`) as a `Member`, which keeps a copy of the entries. The primary is also
the `Leader` of a term. Its `Primary` turns the reports of storage nodes about stored records into
metalog entries.
"""
