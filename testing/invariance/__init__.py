"""Compare a module with one process and name the first difference."""
