"""One training: its steps, the hooks around them, and the checkpoints and logs that it keeps."""
