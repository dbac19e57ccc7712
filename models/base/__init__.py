"""Hold what all families share: config and its keys, model, parts of blocks, tables and rules of names."""
