"""Notebooks executed and rendered to HTML."""
