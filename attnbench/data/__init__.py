"""Corpora on disk and on the Hub, their tokens and batches. Data of probes are in evals/."""
