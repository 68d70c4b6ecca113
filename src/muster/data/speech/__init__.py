"""Clips of speech: audio, its index, features, transcripts and their symbols."""
