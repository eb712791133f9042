"""Will a run fit on a GPU, and how fast can it be there? python scripts/plan.py --help."""

import sys

from mpjax.cli import plan


if __name__ == "__main__":
    sys.exit(plan(sys.argv[1:]))
