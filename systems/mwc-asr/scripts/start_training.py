"""start_training.sh, once Python is there."""

import sys
from pathlib import Path

from muster.entrypoints.start_training import start_training

if __name__ == "__main__":
    sys.exit(start_training(sys.argv[1:], Path(__file__).resolve().parents[1]))
