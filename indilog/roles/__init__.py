"""Roles (events and times in, effects out) and the parts that several roles share.

The shell (`indilog.runtime.node`) runs roles. Each tier's package defines roles of its own.
"""
