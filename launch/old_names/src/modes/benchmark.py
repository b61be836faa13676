"""`python -m src.modes.benchmark` of the documents."""

import sys

from vdpp_core.cli import old_names

if __name__ == "__main__":
    old_names.module("benchmark", sys.argv[1:])
