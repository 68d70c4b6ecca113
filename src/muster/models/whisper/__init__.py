"""Whisper: the model, its search, its Hugging Face folders."""
