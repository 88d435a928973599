"""Triton kernels of ops/delta/."""
