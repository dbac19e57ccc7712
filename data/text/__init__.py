"""From text to tokens: documents, chat templates, tokenizers."""
