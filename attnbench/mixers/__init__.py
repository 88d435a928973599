"""Mixers, a file each: hidden states to an operator's inputs, and its output back. A yaml in conf/attn registers one.

Beside them stand what all mixers share: the interface (base), the layers around the mixing (layers), the comparison
with a definition in float64 (definition) and the promises that every mixer keeps (contract, flops). Recurrences and the
choice of kernels belong to ops/; nothing here trains, or reads a configuration.
"""
