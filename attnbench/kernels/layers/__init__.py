"""Layers around the mixings: convolution, positions, norms, feed-forward, embedding and loss."""
