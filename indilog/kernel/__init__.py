"""What all tiers share: roles and effects, the view, the metalog, records, index formats.

Modules here import only `indilog.base` and one another; every tier and `indilog.runtime` use them.
"""
