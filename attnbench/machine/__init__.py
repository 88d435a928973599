"""The device and its processes: precision, environment, timing, memory, locks, signals; without settings and models."""
