"""Roles: events and times in, effects out; and what several of them share."""
