"""One training: its steps, what happens around them, and what is kept of it."""
