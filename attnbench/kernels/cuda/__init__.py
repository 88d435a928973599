"""FlashAttention's forward pass in CUDA C++, to be read."""
