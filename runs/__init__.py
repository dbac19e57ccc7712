"""Floor 5: what surrounds the work of ranks: launch, rendezvous, heartbeat, signals, metrics, the report.

Offers no names here: import from the file that you need, because a rank should start without importing them
all.
"""
