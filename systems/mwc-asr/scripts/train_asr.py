"""One rank, or the only one.

python scripts/train_asr.py [--config FILE] [--max-parquet-files N] [key=value …]
torchrun --nproc_per_node=4 --standalone scripts/train_asr.py …
"""

import sys
from pathlib import Path

from muster.entrypoints.script import train_system

if __name__ == "__main__":
    train_system(sys.argv[1:], Path(__file__).resolve().parents[1])
