"""`python -m src.modes.NAME` says what to type instead."""
