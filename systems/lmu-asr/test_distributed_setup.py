"""Is this set-up fit to train on?   python test_distributed_setup.py, or through torchrun"""

import sys

from muster.checks.script import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
