"""Identifiers, errors, telemetry and the interface of a log; imports no other package of
IndiLog.
"""
