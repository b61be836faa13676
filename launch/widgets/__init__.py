"""Widgets for notebooks: the panel and its controls, progress bars, comparisons and videos."""
