"""Write the page about a run: its record, charts and tables."""
