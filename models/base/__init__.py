"""The parts that all families share: the config, the family, and the table of names."""
