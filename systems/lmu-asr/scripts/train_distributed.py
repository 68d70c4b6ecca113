"""One process per device, started from here.   python scripts/train_distributed.py [key=value …]

Uses every GPU; without one, a rank per CPU core, at most four. distributed.devices=N starts N ranks.
"""

import sys
from pathlib import Path

from muster.entrypoints.script import train_spawned

CONFIG = Path(__file__).parent.parent / "configs" / "multi_gpu.yaml"

if __name__ == "__main__":
    train_spawned(str(CONFIG), sys.argv[1:])
