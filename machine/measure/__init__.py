"""Measure one machine: its speed and links, layouts, training steps, saving and conversion."""
