"""Compute layers that carry a state from token to token, in chunks and over context ranks (Mamba-2, GDN)."""
