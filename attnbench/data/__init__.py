"""Corpora on disk and on the Hub, their tokens and batches; without models. Data of probes are in evals/."""
