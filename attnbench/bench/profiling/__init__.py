"""Training steps and attention under torch's profiler: recordings, traces, the parts of a step."""
