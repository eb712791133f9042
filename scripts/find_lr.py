"""Find a learning rate: python scripts/find_lr.py --help."""

import sys

from mpjax.cli import find_lr


if __name__ == "__main__":
    sys.exit(find_lr(sys.argv[1:]))
