"""What is known before a run: memory, cost, schedule, the best layout; and the published figures."""
