"""Attention in CUDA C++."""
