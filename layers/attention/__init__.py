"""Compute attention: over whole rows, in blocks, and over context ranks (all-gather or ring attention)."""
