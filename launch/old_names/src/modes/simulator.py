"""`python -m src.modes.simulator` of the documents."""

import sys

from vdpp_core.cli import old_names

if __name__ == "__main__":
    old_names.module("simulator", sys.argv[1:])
