"""Mixers, a file each over one shell; a yaml in conf/attn registers one.

Beside them are the interface (base), options and parts (options, shell, around, layers), the comparison with a
definition in float64 (definition) and the contract of every mixer (contract, flops).
"""
