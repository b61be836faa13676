"""The small SVD that ships with the package: the pipeline, its training and its evaluation."""
