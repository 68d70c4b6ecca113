"""The loop and what it stands on: optimizer, precision, checkpoints, evaluation."""
