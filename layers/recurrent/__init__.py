"""Compute layers that carry a state from token to token: in chunks, over documents and over context ranks."""
