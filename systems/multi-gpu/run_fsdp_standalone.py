"""muster's own loop under FSDP.

torchrun --nproc_per_node=$NUM_GPUS run_fsdp_standalone.py [--recipe NAME] [key=value …]
"""

import sys
from pathlib import Path

from muster.entrypoints.script import script_arguments, train_here

if __name__ == "__main__":
    recipe, overrides = script_arguments(sys.argv[1:], Path(__file__).parent / "recipe.yaml")
    train_here(recipe, ["distributed.strategy=fsdp", *overrides])
