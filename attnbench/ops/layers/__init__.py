"""Layers that all mixers share."""
