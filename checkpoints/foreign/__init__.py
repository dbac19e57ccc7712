"""Read checkpoints of other projects: find their tensors, and the trilith tensor for each foreign name."""
