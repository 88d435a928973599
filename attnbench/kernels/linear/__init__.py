"""Linear attention with a normaliser."""
