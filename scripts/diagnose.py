"""Diagnose a step of a run: python scripts/diagnose.py --help."""

import sys

from mpjax.cli import diagnose


if __name__ == "__main__":
    sys.exit(diagnose(sys.argv[1:]))
