"""Floor 5: what surrounds the work of ranks: launch, rendezvous, heartbeat, signals, metrics, the report.

Offers nothing here: who needs one of them imports its file, since a started process imports few.
"""
