"""Calls that benches time: attention over a sequence and over a cache, and language models."""
