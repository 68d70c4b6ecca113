"""Hugging Face folders of language models: config, weights, reading and writing."""
