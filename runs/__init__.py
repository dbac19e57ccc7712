"""Floor 5: what surrounds a training run: launch, heartbeat, signals, metrics, the report."""
