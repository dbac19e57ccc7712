"""Read checkpoints of other projects: what they hold, under which names, and which of our tensors that is."""
