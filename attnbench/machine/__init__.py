"""The device and its processes: precision, timing, memory, locks, signals. Nothing here reads a config."""
