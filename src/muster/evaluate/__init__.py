"""From what a model puts out to a score: decoding, language models, error rates."""
