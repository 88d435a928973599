"""FlashAttention, with a window, forget gates or several parts, and one new position over a cache."""
