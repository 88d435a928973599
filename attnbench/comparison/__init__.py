"""Comparisons: a plan, its cells, its searches of learning rates, and the record of all of them."""
