"""The journal: segments on disk, checkpoints, recovery, and freeing what is dead."""
