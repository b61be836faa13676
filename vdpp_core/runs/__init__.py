"""What a run leaves: its folder, events, results and metrics; how to read, resume and watch it."""
