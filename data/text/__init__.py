"""Turn text into tokens: documents (text, JSONL, Parquet), conversations and chat templates, tokenizers."""
