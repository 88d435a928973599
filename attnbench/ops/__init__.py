"""Recurrences of the mixers as operators, a file a family: slow definition, chunked form, step, state, FLOPs, kernels.

A function here takes query, key, value and what decays or writes, as tensors (B, T, H, K), and knows no module, no
parameter and no configuration: turning a model's hidden states into these inputs is a mixer's part.
"""
