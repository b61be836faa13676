"""`src` of the documents; installed under that name, see pyproject.toml."""
