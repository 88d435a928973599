"""Calls that benches time: attention over a sequence and over a cache, and language models. No table lies here."""
