"""Compute mixtures of experts: the router, the dispatch of tokens, the experts, and load balancing."""
