"""Using a checkpoint in one process: scores, transcripts, generated text, export."""
