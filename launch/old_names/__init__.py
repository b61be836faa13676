"""Packages with the names of the documents, which answer with the present commands."""
