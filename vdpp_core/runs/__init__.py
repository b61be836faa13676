"""What a run leaves: its folder, events, results and metrics; how to read it, and which ranks have stalled."""
