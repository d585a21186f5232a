"""Messages between nodes, and the envelope that carries them.

Roles of every tier send and handle the messages; `indilog.runtime.transport` carries envelopes.
"""
