"""Compute attention: over whole rows, in blocks, and over context ranks (ring or gathered); with windows,
sinks and soft caps of scores, and on more tensor ranks than kv heads.
"""
