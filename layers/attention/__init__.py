"""Compute attention: over whole rows, in blocks, and over the rows of context ranks (all-gather or ring)."""
