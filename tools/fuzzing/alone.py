"""Imported before any library is: nothing is asked of the network, and a process computes on one thread."""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
os.environ |= {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
os.environ |= {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # others reserve addresses beyond their need
