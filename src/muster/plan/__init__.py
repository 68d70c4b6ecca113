"""Working out a run before it starts."""
