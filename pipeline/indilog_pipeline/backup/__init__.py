"""Backups: `create` copies a platform at one seqnum, and `restore` makes new platforms from the
copy (decision 0045). The command `indilog backup` calls both.
"""
