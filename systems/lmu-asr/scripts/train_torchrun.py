"""One rank of many.   torchrun --nproc_per_node=2 scripts/train_torchrun.py [key=value …]

Every rank runs this file; muster reads torchrun's variables to learn which one it is.
"""

import sys
from pathlib import Path

from muster.entrypoints.script import train_here

CONFIG = Path(__file__).parent.parent / "configs" / "multi_gpu.yaml"

if __name__ == "__main__":
    train_here(str(CONFIG), sys.argv[1:])
