"""Train a model on a Ray cluster: python scripts/train_ray.py --help."""

import sys

from mpjax.cli import train_ray


if __name__ == "__main__":
    sys.exit(train_ray(sys.argv[1:]))
