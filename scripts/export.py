"""Write a checkpoint's weights as safetensors: python scripts/export.py --help."""

import sys

from mpjax.cli import export


if __name__ == "__main__":
    sys.exit(export(sys.argv[1:]))
