"""Triton kernels of ops/common/."""
