"""Parquet and its index, audio, features, text, the global batch plan and the loader."""
