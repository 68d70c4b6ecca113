"""Do the ranks work together?   torchrun --nproc_per_node=4 --standalone validate_distributed.py"""

import sys

from muster.scripts import validate_here

if __name__ == "__main__":
    sys.exit(validate_here())
