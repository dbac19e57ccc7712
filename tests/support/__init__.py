"""What only tests use: harnesses that say one promise each, tiny models, and other people's software."""
