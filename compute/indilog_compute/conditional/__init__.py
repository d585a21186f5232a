"""Appends with a condition: no record with a given tag is newer than the record that the caller
has read (docs/decisions/0043).

One compute node, the *home* of the tag, checks the condition and appends. `home` does both for the
tags whose home this compute node is. `home_requests` sends the appends of this node's callers to
other homes. `conditional_appends` joins `home` and `home_requests` for the engine.
"""
