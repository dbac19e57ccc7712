"""The page about a run: its record, charts and tables."""
