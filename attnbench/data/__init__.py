"""Text to tokens to batch n, a function of (seed, n)."""
