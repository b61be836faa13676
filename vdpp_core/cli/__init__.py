"""The commands of `python -m vdpp_core`."""
