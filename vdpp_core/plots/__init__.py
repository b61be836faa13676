"""Every figure, and the trace for Perfetto."""
