"""Hostile input for every reader of muster; `tools/fuzz.py` is the command."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
