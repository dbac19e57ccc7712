"""Hugging Face folders: found, read, checked and written."""
