"""Explain figures step by step: the formula, the numbers put in, and the result."""
