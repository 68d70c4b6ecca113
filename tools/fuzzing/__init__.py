"""Hostile input for every reader of muster; `tools/fuzz.py` is the command."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
# Before any library is loaded: nothing is asked of the network, and a process computes on one thread.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
