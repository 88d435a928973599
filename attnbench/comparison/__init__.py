"""Comparisons: a plan, its cells, its searches of learning rates, and its record."""
