"""Triton kernels of ops/attention/."""
