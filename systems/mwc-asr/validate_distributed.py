"""Do the ranks work together?   torchrun --nproc_per_node=4 --standalone validate_distributed.py"""

import sys

from muster.checks.script import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
