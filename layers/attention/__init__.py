"""Attention: over whole rows, in blocks, and over rows that context ranks share."""
