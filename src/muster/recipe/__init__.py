"""What to train, on what, how: one validated document."""
