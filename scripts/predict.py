"""Predict with a trained model: python scripts/predict.py --help."""

import sys

from mpjax.cli import predict


if __name__ == "__main__":
    sys.exit(predict(sys.argv[1:]))
