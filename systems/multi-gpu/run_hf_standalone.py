"""Hugging Face's own Trainer under DDP, on the same recipe.

torchrun --nproc_per_node=$NUM_GPUS run_hf_standalone.py [--recipe NAME] [key=value …]
"""

import sys
from pathlib import Path

from muster.entrypoints.script import script_arguments, train_with_trainer

if __name__ == "__main__":
    train_with_trainer(*script_arguments(sys.argv[1:], Path(__file__).parent / "recipe.yaml"))
