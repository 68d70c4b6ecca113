"""Text for language models: documents, tokenizers, packed sequences."""
