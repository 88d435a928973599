"""Softmax attention, with windows and forgetting."""
