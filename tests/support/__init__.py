"""Harnesses that say one promise each, tiny models, and other people's software, for tests alone."""
