"""Parts that several evaluations share."""
