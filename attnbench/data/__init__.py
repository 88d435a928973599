"""Text to tokens to batches: batch n is a function of (seed, n).

Corpora on disk and on the Hub, their vocabulary, their batches. Nothing here knows of a model; the synthetic data of
probes is in evals/.
"""
