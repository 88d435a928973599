"""What several evaluations share."""
