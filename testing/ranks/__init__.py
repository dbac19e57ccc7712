"""Run tests on processes that are reused as ranks."""
