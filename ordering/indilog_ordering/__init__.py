"""The ordering tier: sequencers that agree on the metalog (Scalog 3 and 4.1).

`Sequencer` is the role. Each takes part in the consensus core (`Consensus`) as a `Member`, which
keeps a copy of the entries. The primary is also the `Leader` of a term. `Primary` makes metalog
entries of what storage nodes have stored.
"""
