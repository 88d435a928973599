"""Triton kernels of ops/diagonal/."""
