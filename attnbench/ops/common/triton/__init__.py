"""Triton parts shared by several operators.

pyright does not understand `triton.jit`: modules with kernels or launches switch off the rules that it breaks.
"""
