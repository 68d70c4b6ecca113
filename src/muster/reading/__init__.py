"""What others wrote, read within bounds: YAML, JSON, names of files, and text for a terminal. A file that
is too large, too deep, damaged or not of its kind ends in one sentence."""
