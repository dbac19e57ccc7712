"""Conversion between layouts and formats: a plan made from headers, then carried out."""
