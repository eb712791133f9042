"""Evaluate a checkpoint: python scripts/evaluate.py --help."""

import sys

from mpjax.cli import evaluate


if __name__ == "__main__":
    sys.exit(evaluate(sys.argv[1:]))
