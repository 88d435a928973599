"""Triton kernels of ops/scalar/."""
