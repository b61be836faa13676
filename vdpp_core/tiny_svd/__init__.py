"""The small SVD that the package carries: the pipeline, and how it was trained and judged."""
