"""Data, optimizer, precision, schedule and the training loop."""
