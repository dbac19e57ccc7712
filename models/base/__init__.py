"""Hold what all families share: config, family, decoder, blocks, and the rules of Hugging Face names."""
