"""Layers shared by all mixers."""
