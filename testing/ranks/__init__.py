"""Processes that tests reuse as ranks."""
