"""Backups: a copy of a platform at one seqnum, and new platforms from it (decision 0045)."""
