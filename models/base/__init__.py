"""Hold what all families share: the config, the family, the decoder, its blocks, and the table of Hugging
Face names.
"""
