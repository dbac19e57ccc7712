"""Measure one machine: its speed, links and layers, layouts, training steps, saving and conversion."""
