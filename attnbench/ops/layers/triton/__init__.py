"""Triton kernels of ops/layers/."""
