"""One training: its steps, the hooks around them, its checkpoints and logs."""
