"""Train a model: python scripts/train.py --help."""

import sys

from mpjax.cli import train


if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
