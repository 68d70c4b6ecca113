"""muster trains speech and language models on every GPU you have."""

__version__ = "0.1.0"
