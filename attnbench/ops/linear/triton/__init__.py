"""Triton kernels of ops/linear/."""
