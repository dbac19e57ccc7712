"""Compare a model with transformers, one process and a layout."""
