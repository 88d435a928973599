"""Operators, a package per family: definition, chunked form in torch, FLOPs and choice of the backend; in `triton/`
beside them our Triton kernels, bound as custom operators with fake, autograd and vmap rules; in `cuda/` CUDA C++.

A function here takes query, key, value and what decays or writes, as tensors (B, T, H, K), and knows no module, no
parameter and no configuration: turning a model's hidden states into these inputs is a mixer's part. Modules in
`triton/` are imported in the functions that use them, because Triton is there on CUDA machines alone.
"""
