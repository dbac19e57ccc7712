"""Checkpoints and Hugging Face folders: read, write, convert, verify."""
