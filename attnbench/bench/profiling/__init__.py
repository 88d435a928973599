"""Torch's profiler: recording, reading its traces, and telling the parts of a training step apart. No table lies here."""
