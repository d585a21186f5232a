"""The journal: segments on disk, checkpoints, recovery, and freeing the space of dead frames.

`indilog.runtime.node.NodeShell` writes and recovers it; `indilog_pipeline` reads it.
"""
