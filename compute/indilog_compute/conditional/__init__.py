"""Appends with a condition: no newer record has a given tag (docs/decisions/0043).

`home` checks the conditions, and appends, for the tags whose home this compute node is.
`home_requests` sends the appends of this node's callers to other homes. `conditional_appends` joins
the two for the engine.
"""
