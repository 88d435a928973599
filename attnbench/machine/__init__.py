"""The device and its processes: precision, environment, timing, memory, locks, signals.

Everything here is about the machine; nothing here reads a config or knows of a model.
"""
