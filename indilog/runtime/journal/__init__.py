"""The journal: segments on disk, checkpoints, recovery, and freeing the space of dead frames."""
