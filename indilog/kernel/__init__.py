"""What all tiers share: roles and effects, the view, the metalog, records, index formats."""
