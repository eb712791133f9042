"""Compare runs: python scripts/compare.py --help."""

import sys

from mpjax.cli import compare


if __name__ == "__main__":
    sys.exit(compare(sys.argv[1:]))
