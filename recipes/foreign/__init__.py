"""Recipes made of other programs' configurations."""
