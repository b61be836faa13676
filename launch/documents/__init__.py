"""The experiments of the user's documents, repeated on this machine: `python -m launch documents`."""
