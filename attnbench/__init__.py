"""attnbench: any sequence mixer in the same language model, on the same data, measured by the same battery."""
