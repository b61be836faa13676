"""Runs beside each other, beside other libraries, and videos beside the truth."""
