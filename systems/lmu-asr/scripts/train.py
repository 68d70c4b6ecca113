"""One process: one GPU, or all CPU cores.   python scripts/train.py [key=value …]"""

import sys
from pathlib import Path

from muster.entrypoints.script import train_here

CONFIG = Path(__file__).parent.parent / "configs" / "base_config.yaml"

if __name__ == "__main__":
    train_here(str(CONFIG), sys.argv[1:])
