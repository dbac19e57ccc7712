"""Compute attention: over whole rows, in blocks, and over rows that context ranks share (all-gather or
ring).
"""
