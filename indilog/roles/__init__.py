"""Roles (events and times in, effects out) and the parts that several roles share."""
