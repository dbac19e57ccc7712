"""Compute attention: over whole rows, in blocks, and over context ranks (ring or gathered)."""
