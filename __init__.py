"""Megatron-style training for PyTorch: one model, any layout. Each room's door says what it offers."""
