"""What notebooks show: the panel, its controls, progress, comparison and videos."""
