"""The commands of `python -m vdpp_core`, and what `python -m launch` shares with them."""
