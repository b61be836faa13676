"""Predictions before a run: memory, cost, schedule and the best layout; and the published figures."""
